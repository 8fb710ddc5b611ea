//! A text as the sequences that a language model is trained on.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use anyhow::{anyhow, bail, ensure};
use candle_core::{Device, Tensor};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::tokenizer::{Tokenizer, Tokens};

/// By what a text is known again: its length, and the SHA-256 of up to 65,536 of its tokens, evenly spread.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fingerprint {
    /// Number of tokens.
    pub tokens: usize,
    /// Hexadecimal digits.
    pub sha256: String,
}

/// A part of a text, cut into sequences of `context` tokens that do not overlap. Sequence `i` has the inputs
/// `i context .. (i + 1) context`, and as targets the tokens after each; a rest that fills no sequence is left out.
#[derive(Debug, Clone)]
pub struct Dataset {
    tokens: Arc<Tokens>,
    part: Range<usize>,
    context: usize,
}

impl Dataset {
    /// The tokens of a file: with the ending `.bin` 16-bit numbers, otherwise a text.
    ///
    /// # Errors
    /// The file cannot be read, is empty, is cut off, or too short for one sequence.
    pub fn open(path: &Path, tokenizer: &Tokenizer, context: usize) -> anyhow::Result<Self> {
        let tokens = match is_token_file(path) {
            true => Tokens::File(map(path)?),
            false => tokenizer.encode_file(path)?,
        };
        let len = tokens.len();
        ensure!(len > 0, "{} is empty", path.display());
        let all = Self {
            tokens: Arc::new(tokens),
            part: 0..len,
            context,
        };
        ensure!(
            !all.is_empty(),
            "{} has {len} tokens, too short for a context of {context}: it takes at least {}",
            path.display(),
            context + 1
        );
        Ok(all)
    }

    /// Two parts: the beginning, and the last `fraction`.
    ///
    /// # Errors
    /// One of them is too short for one sequence.
    pub fn split(self, fraction: f64) -> anyhow::Result<(Self, Self)> {
        let held_out = (self.part.len() as f64 * fraction).ceil() as usize;
        let at = self.part.end - held_out;
        let part = |part| Self {
            part,
            tokens: Arc::clone(&self.tokens),
            context: self.context,
        };
        let (train, validation) = (part(self.part.start..at), part(at..self.part.end));
        for (name, part) in [("the rest", &train), ("the held-out part", &validation)] {
            ensure!(
                !part.is_empty(),
                "with data.validation_fraction {fraction} {name} has {} tokens, too short for a context of {}: it takes at least {}",
                part.part.len(),
                self.context,
                self.context + 1
            );
        }
        Ok((train, validation))
    }

    /// Number of sequences.
    pub fn len(&self) -> usize {
        self.part.len().saturating_sub(1) / self.context
    }

    /// True if there is no whole sequence.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Number of tokens.
    pub fn num_tokens(&self) -> usize {
        self.part.len()
    }

    /// By what this part is known again.
    pub fn fingerprint(&self) -> Fingerprint {
        let len = self.part.len();
        let count = len.min(1 << 16);
        let mut hash = Sha256::new();
        for i in 0..count {
            let at = self.part.start + (i as u128 * len as u128 / count as u128) as usize;
            hash.update(self.tokens.at(at).to_le_bytes());
        }
        Fingerprint {
            tokens: len,
            sha256: hash.finalize().iter().map(|b| format!("{b:02x}")).collect(),
        }
    }

    /// Refuses tokens that are not below `vocab_size`.
    ///
    /// # Errors
    /// The first such token, and its place.
    pub fn check_vocab(&self, vocab_size: usize) -> anyhow::Result<()> {
        for at in self.part.clone() {
            let token = self.tokens.at(at);
            if token as usize >= vocab_size {
                bail!(
                    "token {at} is {token}, but model.vocab_size is {vocab_size}: it must be more than every token"
                );
            }
        }
        Ok(())
    }

    /// Inputs and targets of these sequences, `[B, T]` u32 each.
    ///
    /// # Errors
    /// Those of Candle.
    pub fn batch(&self, sequences: &[usize], device: &Device) -> anyhow::Result<(Tensor, Tensor)> {
        let of = |shift: usize| -> Vec<u32> {
            let starts = sequences
                .iter()
                .map(|i| self.part.start + i * self.context + shift);
            starts
                .flat_map(|start| (start..start + self.context).map(|i| self.tokens.at(i)))
                .collect()
        };
        let shape = (sequences.len(), self.context);
        Ok((
            Tensor::from_vec(of(0), shape, device)?,
            Tensor::from_vec(of(1), shape, device)?,
        ))
    }
}

impl Tokens {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Ids(ids) => ids.len(),
            Self::File(map) => map.len() / 2,
        }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn at(&self, i: usize) -> u32 {
        match self {
            Self::Bytes(bytes) => u32::from(bytes[i]),
            Self::Ids(ids) => ids[i],
            Self::File(map) => u32::from(u16::from_le_bytes([map[2 * i], map[2 * i + 1]])),
        }
    }
}

/// True for the ending `.bin`.
pub fn is_token_file(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "bin")
}

/// The first four bytes of the token files of llm.c, which have a header.
const LLM_C_MAGIC: [u8; 4] = 20_240_520u32.to_le_bytes();

fn map(path: &Path) -> anyhow::Result<memmap2::Mmap> {
    let cannot_read = |e| anyhow!("cannot read the token file {}: {e}", path.display());
    let file = std::fs::File::open(path).map_err(cannot_read)?;
    ensure!(
        file.metadata().map_err(cannot_read)?.len() > 0,
        "{} is empty",
        path.display()
    );
    // SAFETY: the file is only read. Who cuts it off while a run reads it gets a bus error, as with any mapped file.
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(cannot_read)?;
    ensure!(
        map.len() % 2 == 0,
        "{} has {} bytes, not a whole number of 16-bit tokens: it is cut off, or not a token file",
        path.display(),
        map.len()
    );
    ensure!(
        !map.starts_with(&LLM_C_MAGIC),
        "{} has the header of llm.c's token files; remove its first 1024 bytes",
        path.display()
    );
    Ok(map)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(name: &str, bytes: &[u8]) -> anyhow::Result<(tempfile::TempDir, std::path::PathBuf)> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join(name);
        std::fs::write(&path, bytes)?;
        Ok((folder, path))
    }

    #[test]
    fn sequences_do_not_overlap_and_targets_follow() -> anyhow::Result<()> {
        let (_folder, path) = file("text.txt", b"abcdefghij")?;
        let data = Dataset::open(&path, &Tokenizer::Bytes, 3)?;
        assert_eq!(data.len(), 3);
        let (x, y) = data.batch(&[0, 2], &Device::Cpu)?;
        let text = |t: Tensor| -> anyhow::Result<Vec<String>> {
            Ok(t.to_vec2::<u32>()?
                .iter()
                .map(|row| dp_models::ByteTokens::decode(row))
                .collect())
        };
        assert_eq!(text(x)?, ["abc", "ghi"]);
        assert_eq!(text(y)?, ["bcd", "hij"]);
        // 10 tokens, 4 of them held out: 6 and 4, 1 sequence each.
        let (train, validation) = data.split(0.4)?;
        assert_eq!((train.len(), validation.len()), (1, 1));
        assert_eq!(text(validation.batch(&[0], &Device::Cpu)?.1)?, ["hij"]);
        Ok(())
    }

    #[test]
    fn a_bin_file_is_16_bit_numbers() -> anyhow::Result<()> {
        let ids = [50256u16, 1, 2, 3, 65535];
        let bytes: Vec<u8> = ids.iter().flat_map(|i| i.to_le_bytes()).collect();
        let (_folder, path) = file("train.bin", &bytes)?;
        let data = Dataset::open(&path, &Tokenizer::Numbers, 2)?;
        let (x, y) = data.batch(&[0, 1], &Device::Cpu)?;
        assert_eq!(x.to_vec2::<u32>()?, [[50256, 1], [2, 3]]);
        assert_eq!(y.to_vec2::<u32>()?, [[1, 2], [3, 65535]]);
        let error = data.check_vocab(50257).map_err(|e| e.to_string());
        assert!(error.is_err_and(|e| e.contains("token 4 is 65535")));
        data.check_vocab(65536)
    }

    #[test]
    fn files_that_cannot_be_are_named() -> anyhow::Result<()> {
        let refused = |name: &str, bytes: &[u8], words: &str| -> anyhow::Result<()> {
            let (_folder, path) = file(name, bytes)?;
            let error = Dataset::open(&path, &Tokenizer::Bytes, 4).map_err(|e| e.to_string());
            assert!(
                error
                    .as_ref()
                    .is_err_and(|e| e.contains(words) && e.contains(name)),
                "{error:?}"
            );
            Ok(())
        };
        refused("a.txt", b"", "is empty")?;
        refused("a.txt", b"1234", "takes at least 5")?;
        refused("a.bin", b"", "is empty")?;
        refused("a.bin", b"123", "cut off")?;
        refused(
            "a.bin",
            &[LLM_C_MAGIC.as_slice(), &[0; 1024]].concat(),
            "llm.c",
        )?;
        let missing = Dataset::open(Path::new("no/such/file"), &Tokenizer::Bytes, 4);
        assert!(missing.is_err_and(|e| e.to_string().contains("no/such/file")));
        let (_folder, path) = file("a.txt", b"0123456789")?;
        let data = Dataset::open(&path, &Tokenizer::Bytes, 4)?;
        assert!(
            data.clone()
                .split(0.1)
                .is_err_and(|e| e.to_string().contains("held-out"))
        );
        assert!(
            data.split(0.9)
                .is_err_and(|e| e.to_string().contains("the rest"))
        );
        Ok(())
    }
}
