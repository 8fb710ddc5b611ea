//! From text to tokens and back.

use std::path::Path;

use anyhow::{Context, anyhow};
use dp_models::ByteTokens;

/// How text becomes tokens.
#[derive(Debug)]
pub enum Tokenizer {
    /// Each byte is a token.
    Bytes,
    /// A `tokenizer.json` of Hugging Face's tokenizers, e.g. byte-pair encoding.
    HuggingFace(Box<tokenizers::Tokenizer>),
    /// Tokens are shown as numbers: what they were made with is not known.
    Numbers,
}

impl Tokenizer {
    /// `bytes`, or the path of a `tokenizer.json`.
    ///
    /// # Errors
    /// The file cannot be read, or is no tokenizer.
    pub fn open(name: &str) -> anyhow::Result<Self> {
        if name == "bytes" {
            return Ok(Self::Bytes);
        }
        std::fs::metadata(name).map_err(|e| {
            anyhow!(
                "data.tokenizer: {name}: {e}; expected \"bytes\" or the path of a tokenizer.json"
            )
        })?;
        let tokenizer = tokenizers::Tokenizer::from_file(name)
            .map_err(|e| anyhow!("data.tokenizer: {name} is no tokenizer.json: {e}"))?;
        Ok(Self::HuggingFace(Box::new(tokenizer)))
    }

    /// Number of different tokens; `None` if it is not known.
    pub fn vocab_size(&self) -> Option<usize> {
        match self {
            Self::Bytes => Some(ByteTokens::VOCAB_SIZE),
            Self::HuggingFace(tokenizer) => Some(tokenizer.get_vocab_size(true)),
            Self::Numbers => None,
        }
    }

    /// Tokens of a text.
    ///
    /// # Errors
    /// The tokenizer's own; for numbers, what is none.
    pub fn encode(&self, text: &str) -> anyhow::Result<Vec<u32>> {
        match self {
            Self::Bytes => Ok(ByteTokens::encode(text)),
            Self::HuggingFace(tokenizer) => encode_pieces(tokenizer, text),
            Self::Numbers => text
                .split_whitespace()
                .map(|n| {
                    n.parse()
                        .with_context(|| format!("`{n}` is no number of a token"))
                })
                .collect(),
        }
    }

    /// Text of tokens.
    ///
    /// # Errors
    /// The tokenizer's own.
    pub fn decode(&self, tokens: &[u32]) -> anyhow::Result<String> {
        match self {
            Self::Bytes => Ok(ByteTokens::decode(tokens)),
            Self::HuggingFace(tokenizer) => {
                tokenizer.decode(tokens, false).map_err(|e| anyhow!("{e}"))
            }
            Self::Numbers => {
                let numbers: Vec<String> = tokens.iter().map(ToString::to_string).collect();
                Ok(numbers.join(" "))
            }
        }
    }

    /// Tokens of a file of text.
    ///
    /// # Errors
    /// The file cannot be read, or is not UTF-8 where that is needed.
    pub fn encode_file(&self, path: &Path) -> anyhow::Result<Tokens> {
        let bytes = std::fs::read(path)
            .map_err(|e| anyhow!("cannot read the text file {}: {e}", path.display()))?;
        match self {
            Self::Bytes => Ok(Tokens::Bytes(bytes)),
            _ => {
                let text = String::from_utf8(bytes)
                    .map_err(|e| anyhow!("the text file {} is not UTF-8: {e}", path.display()))?;
                Ok(Tokens::Ids(self.encode(&text)?))
            }
        }
    }
}

/// Tokens in memory, or in a file that is mapped into it.
#[derive(Debug)]
pub enum Tokens {
    /// Each byte is a token.
    Bytes(Vec<u8>),
    /// Numbers of tokens.
    Ids(Vec<u32>),
    /// A file of 16-bit numbers, little-endian.
    File(memmap2::Mmap),
}

/// Bytes of text that are encoded at a time.
const PIECE: usize = 1 << 16;

/// Encodes a long text in pieces, on all cores. A piece ends at a line break between two characters that are no white space:
/// there the pre-tokenizers of byte-pair encodings end a word in any case, so the tokens are those of the whole text.
fn encode_pieces(tokenizer: &tokenizers::Tokenizer, text: &str) -> anyhow::Result<Vec<u32>> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while rest.len() > PIECE {
        let bytes = rest.as_bytes();
        let ends_here = |i: &usize| {
            bytes[*i] == b'\n'
                && !bytes[i - 1].is_ascii_whitespace()
                && bytes.get(i + 1).is_some_and(|b| b.is_ascii_graphic())
        };
        let Some(end) = (PIECE..bytes.len()).find(ends_here) else {
            break;
        };
        let (piece, tail) = rest.split_at(end + 1);
        pieces.push(piece);
        rest = tail;
    }
    pieces.push(rest);
    let encodings = tokenizer
        .encode_batch(pieces, false)
        .map_err(|e| anyhow!("cannot tokenize the text: {e}"))?;
    Ok(encodings
        .iter()
        .flat_map(|e| e.get_ids().iter().copied())
        .collect())
}
