//! SHA-256 of what is written.

use std::io::{self, Sink, Write};

use sha2::{Digest, Sha256};

/// Counts and hashes what passes through to `out`.
pub(crate) struct Hashing<W> {
    out: W,
    hash: Sha256,
    bytes: u64,
}

impl Hashing<Sink> {
    /// Hashes what is written, and keeps nothing.
    pub fn only() -> Self {
        Self::new(io::sink())
    }
}

impl<W> Hashing<W> {
    pub fn new(out: W) -> Self {
        Self {
            out,
            hash: Sha256::new(),
            bytes: 0,
        }
    }

    /// Bytes written so far.
    pub fn num_bytes(&self) -> u64 {
        self.bytes
    }

    /// The writer below, and the digest.
    pub fn finish(self) -> (W, [u8; 32]) {
        (self.out, self.hash.finalize().into())
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.out.write(bytes)?;
        self.hash.update(&bytes[..n]);
        self.bytes += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Hexadecimal digits of `bytes`.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_of_abc() -> io::Result<()> {
        let mut hashing = Hashing::new(Vec::new());
        hashing.write_all(b"ab")?;
        hashing.write_all(b"c")?;
        assert_eq!(hashing.num_bytes(), 3);
        let (out, digest) = hashing.finish();
        assert_eq!(out, b"abc");
        // FIPS 180-2, appendix B.1.
        assert!(hex(&digest).starts_with("ba7816bf8f01cfea414140de5dae2223"));
        Ok(())
    }
}
