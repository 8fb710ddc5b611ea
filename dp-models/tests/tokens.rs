use dp_models::ByteTokens;

use crate::support::{CPU, assert_err};

#[test]
fn windows_cover_the_text() {
    let text = ByteTokens::from_bytes("abcdef").unwrap();
    assert_eq!(text.len(), 6);
    assert_eq!(text.num_windows(4).unwrap(), 2);
    let (inputs, targets) = text.sample(1, 4).unwrap();
    assert_eq!(inputs, ByteTokens::encode("bcde"));
    assert_eq!(targets, ByteTokens::encode("cdef"));

    let (inputs, targets) = text.batch(&[1, 0, 1], 4, &CPU).unwrap();
    let rows = |tokens: &candle_core::Tensor| -> Vec<String> {
        let rows = tokens.to_vec2::<u32>().unwrap();
        rows.iter().map(|row| ByteTokens::decode(row)).collect()
    };
    assert_eq!(rows(&inputs), ["bcde", "abcd", "bcde"]);
    assert_eq!(rows(&targets), ["cdef", "bcde", "cdef"]);
}

#[test]
fn errors_name_what_is_wrong() {
    assert_err(ByteTokens::from_bytes(""), "the text is empty");
    let text = ByteTokens::from_bytes("abc").unwrap();
    assert_err(text.num_windows(3), "too short for a context of 3");
    assert_err(text.sample(0, 3), "it takes at least 4");
    assert_err(text.num_windows(0), "context must not be zero");
    assert_err(text.sample(1, 2), "offset 1 is not below the 1 windows");
    assert_err(text.sample(usize::MAX, 2), "offset");
    assert_err(text.batch(&[0, 5], 2, &CPU), "offset 5");
    assert_err(text.batch(&[], 2, &CPU), "at least one offset");
}

#[test]
fn files_are_read_whole() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    assert_err(ByteTokens::from_file(&path), "text.txt");
    std::fs::write(&path, "").unwrap();
    assert_err(ByteTokens::from_file(&path), "text.txt is empty");
    std::fs::write(&path, [0u8, 255, 13, 10]).unwrap();
    let text = ByteTokens::from_file(&path).unwrap();
    assert_eq!(text, ByteTokens::from_bytes([0u8, 255, 13, 10]).unwrap());
    assert_eq!(text.sample(0, 3).unwrap().1, [255, 13, 10]);
}

#[test]
fn decode_is_lossy() {
    let text = "na\u{ef}ve";
    assert_eq!(ByteTokens::decode(&ByteTokens::encode(text)), text);
    assert_eq!(
        ByteTokens::decode(&[97, 0xC3, 98, 1000]),
        "a\u{fffd}b\u{fffd}"
    );
}
