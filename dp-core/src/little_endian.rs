//! Numbers as little-endian bytes, as safetensors files and hashes have them; a chunk at a time.

use std::io::{self, Read, Write};

use crate::buffer::Element;

/// Bytes that are converted at a time.
pub(crate) const CHUNK: usize = 1 << 16;

/// Writes `values` as little-endian bytes.
pub(crate) fn write_le<T: Element>(
    values: &[T],
    out: &mut (impl Write + ?Sized),
) -> io::Result<()> {
    let mut chunk = [0u8; CHUNK];
    for values in values.chunks(CHUNK / size_of::<T>()) {
        let bytes = &mut chunk[..size_of_val(values)];
        T::to_le(values, bytes);
        out.write_all(bytes)?;
    }
    Ok(())
}

/// Fills `values` from little-endian bytes.
pub(crate) fn read_le<T: Element>(
    input: &mut (impl Read + ?Sized),
    values: &mut [T],
) -> io::Result<()> {
    let mut chunk = [0u8; CHUNK];
    for values in values.chunks_mut(CHUNK / size_of::<T>()) {
        let bytes = &mut chunk[..size_of_val(values)];
        input.read_exact(bytes)?;
        T::from_le(bytes, values);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_across_chunks() -> io::Result<()> {
        // One element more than a chunk holds.
        let values: Vec<f64> = (0..=CHUNK / 8).map(|i| i as f64 / 3.0).collect();
        let mut bytes = Vec::new();
        write_le(&values, &mut bytes)?;
        assert_eq!(bytes[8..16], (1.0f64 / 3.0).to_le_bytes());
        let mut back = vec![0f64; values.len()];
        read_le(&mut bytes.as_slice(), &mut back)?;
        assert_eq!(back, values);
        assert!(read_le(&mut &bytes[..bytes.len() - 1], &mut back).is_err());
        Ok(())
    }
}
