//! Byte-level tokens of a text, and the windows a language model is trained on.
//!
//! ```text
//! text      t h e   c a t   s a t          a window of context 4 at offset 4:
//! offset    0 1 2 3 4 5 6 7 8 9 10           inputs   c a t _
//!                   |-------|                targets  a t _ s      (the inputs one byte later)
//! ```

use std::path::Path;

use candle_core::{Device, Result, Tensor, bail};

/// A text as tokens: each byte is one token, so the vocabulary is 256 and no tokenizer is needed.
///
/// ```
/// use candle_core::Device;
/// use dp_models::ByteTokens;
///
/// let text = ByteTokens::from_bytes("hello world")?;
/// assert_eq!(text.num_windows(4)?, 7);
/// let (inputs, targets) = text.batch(&[0, 6], 4, &Device::Cpu)?;
/// assert_eq!(ByteTokens::decode(&inputs.to_vec2::<u32>()?[0]), "hell");
/// assert_eq!(ByteTokens::decode(&targets.to_vec2::<u32>()?[1]), "orld");
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ByteTokens {
    bytes: Vec<u8>,
}

impl ByteTokens {
    /// Number of different tokens, the least `vocab_size` of a model trained on them.
    pub const VOCAB_SIZE: usize = 256;

    /// Tokens of a text in memory.
    ///
    /// # Errors
    ///
    /// The text is empty.
    pub fn from_bytes(bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let bytes = bytes.into();
        if bytes.is_empty() {
            bail!("the text is empty")
        }
        Ok(Self { bytes })
    }

    /// Tokens of a file.
    ///
    /// # Errors
    ///
    /// The file cannot be read, or is empty; the text of the error has its path.
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        match std::fs::read(path) {
            Ok(bytes) if bytes.is_empty() => bail!("the text file {} is empty", path.display()),
            Ok(bytes) => Ok(Self { bytes }),
            Err(err) => bail!("cannot read the text file {}: {err}", path.display()),
        }
    }

    /// Number of tokens; at least one.
    #[allow(clippy::len_without_is_empty)] // A text is never empty.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Number of windows of `context` tokens: offsets `0 .. num_windows` can be asked for. It is `len - context`, because the
    /// last target lies one token after the last input.
    ///
    /// # Errors
    ///
    /// `context` is zero, or the text has not more than `context` tokens.
    pub fn num_windows(&self, context: usize) -> Result<usize> {
        if context == 0 {
            bail!("context must not be zero")
        }
        if self.len() <= context {
            bail!(
                "the text has {} tokens, too short for a context of {context}: it takes at least {}",
                self.len(),
                context + 1
            )
        }
        Ok(self.len() - context)
    }

    /// The window at `offset`: inputs and targets, `context` tokens each.
    ///
    /// # Errors
    ///
    /// As [`num_windows`](Self::num_windows), or `offset` is not below it.
    pub fn sample(&self, offset: usize, context: usize) -> Result<(Vec<u32>, Vec<u32>)> {
        let num_windows = self.num_windows(context)?;
        if offset >= num_windows {
            bail!("offset {offset} is not below the {num_windows} windows of context {context}")
        }
        let tokens = |start: usize| {
            let window = &self.bytes[start..start + context];
            window.iter().map(|&byte| u32::from(byte)).collect()
        };
        Ok((tokens(offset), tokens(offset + 1)))
    }

    /// The windows at `offsets`, one a row: inputs and targets, each `[B, T]` u32 with `T = context`.
    ///
    /// # Errors
    ///
    /// As [`sample`](Self::sample), or `offsets` is empty.
    pub fn batch(
        &self,
        offsets: &[usize],
        context: usize,
        device: &Device,
    ) -> Result<(Tensor, Tensor)> {
        if offsets.is_empty() {
            bail!("a batch needs at least one offset")
        }
        let mut inputs = Vec::with_capacity(offsets.len() * context);
        let mut targets = Vec::with_capacity(offsets.len() * context);
        for &offset in offsets {
            let (input, target) = self.sample(offset, context)?;
            inputs.extend(input);
            targets.extend(target);
        }
        let shape = (offsets.len(), context);
        Ok((
            Tensor::from_vec(inputs, shape, device)?,
            Tensor::from_vec(targets, shape, device)?,
        ))
    }

    /// Tokens of `text`, for a prompt.
    pub fn encode(text: &str) -> Vec<u32> {
        text.bytes().map(u32::from).collect()
    }

    /// Text of `tokens`. Bytes that are not UTF-8 and tokens above 255 become U+FFFD.
    pub fn decode(tokens: &[u32]) -> String {
        // 0xFF occurs nowhere in UTF-8.
        let byte = |&token: &u32| u8::try_from(token).unwrap_or(0xFF);
        let bytes: Vec<u8> = tokens.iter().map(byte).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }
}
