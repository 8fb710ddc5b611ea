//! Numbers of parameters and of bytes, as people write them.

use bytesize::ByteSize;

/// The largest number of parameters: with it, no number of bytes leaves 64 bits.
const LARGEST_COUNT: u64 = 1_000_000_000_000_000;

/// A number of parameters: `7.5B`, `350M`, `1T`, `120000`. K, M, B and T are powers of 1000.
///
/// # Errors
/// What is wrong with `text`.
pub fn count(text: &str) -> Result<u64, String> {
    let (number, digits) = match text.chars().last() {
        Some('K' | 'k') => (&text[..text.len() - 1], 3),
        Some('M' | 'm') => (&text[..text.len() - 1], 6),
        Some('B' | 'b') => (&text[..text.len() - 1], 9),
        Some('T' | 't') => (&text[..text.len() - 1], 12),
        _ => (text, 0),
    };
    // In integers, so that no count is rounded.
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let is_number = |part: &str| part.chars().all(|c| c.is_ascii_digit());
    if whole.is_empty() || !is_number(whole) || !is_number(fraction) {
        return Err("expected a count such as 7.5B, 350M, 1T or 120000".to_string());
    }
    let fraction = fraction.trim_end_matches('0');
    if fraction.len() > digits {
        return Err("is not a whole number".to_string());
    }
    let zeros = "0".repeat(digits - fraction.len());
    match format!("{whole}{fraction}{zeros}").parse::<u64>() {
        Ok(0) => Err("must be at least 1".to_string()),
        Ok(count) if count <= LARGEST_COUNT => Ok(count),
        _ => Err("must be at most 1000T".to_string()),
    }
}

/// A card's memory in bytes: `80GiB` (powers of 1024), `80GB` (powers of 1000).
///
/// # Errors
/// What is wrong with `text`.
pub fn bytes(text: &str) -> Result<u64, String> {
    match text.parse::<ByteSize>() {
        Ok(ByteSize(0)) => Err("must be at least 1 byte".to_string()),
        // What is more than 64 bits hold becomes the most that they do.
        Ok(ByteSize(u64::MAX)) => Err("must be less than 16 EiB".to_string()),
        Ok(ByteSize(bytes)) => Ok(bytes),
        Err(_) => Err("expected a size such as 80GiB, 24GB or 512MiB".to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_exact() {
        let good = [
            ("7.5B", 7_500_000_000),
            ("350M", 350_000_000),
            ("1T", 1_000_000_000_000),
            ("120000", 120_000),
            ("1.10K", 1_100),
            ("124439808", 124_439_808),
            ("1000T", LARGEST_COUNT),
        ];
        for (text, expected) in good {
            assert_eq!(count(text), Ok(expected), "{text}");
        }
        for text in [
            "",
            "B",
            ".5B",
            "7.5X",
            "-1",
            "0",
            "0.0M",
            "1.5",
            "1.2345K",
            "1001T",
            "1e9",
            "7,5B",
            "99999999999999999999",
        ] {
            assert!(count(text).is_err(), "{text}");
        }
    }

    #[test]
    fn bytes_have_units() {
        assert_eq!(bytes("80GiB"), Ok(80 << 30));
        assert_eq!(bytes("80 GB"), Ok(80_000_000_000));
        assert_eq!(bytes("1.5MiB"), Ok(3 << 19));
        for text in [
            "80 apples",
            "0GiB",
            "-80GiB",
            "GiB",
            "NaN",
            "infGB",
            "16EiB",
            "99EB",
        ] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }
}
