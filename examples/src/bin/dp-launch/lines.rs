//! Cuts a stream of bytes into lines, and puts a prefix in front of each.

use std::collections::VecDeque;

/// Longer lines are cut, so that a program which never ends its line takes no more memory than this.
const LONGEST: usize = 1 << 20;
/// How many lines are kept, and how much of each.
const KEPT: usize = 10;
const KEPT_BYTES: usize = 1000;

/// The lines of one stream.
pub struct Lines {
    prefix: Vec<u8>,
    /// A line that has not ended yet.
    begun: Vec<u8>,
    last: VecDeque<Vec<u8>>,
}

impl Lines {
    pub fn new(prefix: &str) -> Self {
        Self {
            prefix: prefix.as_bytes().to_vec(),
            begun: Vec::new(),
            last: VecDeque::new(),
        }
    }

    /// Takes the next bytes, and returns the lines that they complete.
    pub fn push(&mut self, mut bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        while !bytes.is_empty() {
            let room = LONGEST - self.begun.len();
            let end = bytes.iter().take(room + 1).position(|b| *b == b'\n');
            let (line, rest) = match end {
                Some(end) => (&bytes[..end], &bytes[end + 1..]),
                None if bytes.len() > room => bytes.split_at(room),
                None => {
                    self.begun.extend_from_slice(bytes);
                    break;
                }
            };
            self.begun.extend_from_slice(line);
            self.end_line(&mut out);
            bytes = rest;
        }
        out
    }

    /// The line that the stream has ended in, if it is one.
    pub fn finish(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        if !self.begun.is_empty() {
            self.end_line(&mut out);
        }
        out
    }

    fn end_line(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.prefix);
        out.extend_from_slice(&self.begun);
        out.push(b'\n');
        if self.last.len() == KEPT {
            self.last.pop_front();
        }
        self.last
            .push_back(self.begun[..self.begun.len().min(KEPT_BYTES)].to_vec());
        self.begun.clear();
    }

    /// The last lines of the stream.
    pub fn into_last(self) -> Vec<String> {
        let text = |line: Vec<u8>| String::from_utf8_lossy(&line).into_owned();
        self.last.into_iter().map(text).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn relay(parts: &[&[u8]]) -> Vec<u8> {
        let mut lines = Lines::new("> ");
        let mut out: Vec<u8> = parts.iter().flat_map(|part| lines.push(part)).collect();
        out.extend(lines.finish());
        out
    }

    #[test]
    fn lines_are_the_same_however_they_arrive() {
        let text = b"one\n\ntwo \xff\r\nno end";
        let expected = b"> one\n> \n> two \xff\r\n> no end\n";
        assert_eq!(relay(&[text]), expected);
        for cut in 0..text.len() {
            assert_eq!(relay(&[&text[..cut], &text[cut..]]), expected, "{cut}");
        }
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(relay(&bytes), expected);
        assert_eq!(relay(&[]), b"");
    }

    #[test]
    fn only_lines_longer_than_the_longest_are_cut() {
        for (len, lines) in [
            (LONGEST, 1),
            (LONGEST + 1, 2),
            (2 * LONGEST, 2),
            (2 * LONGEST + 1, 3),
        ] {
            let mut text = vec![b'x'; len];
            text.push(b'\n');
            for chunk in [text.len(), 65_536, 1000] {
                let out = relay(&text.chunks(chunk).collect::<Vec<_>>());
                let count = |byte| out.iter().filter(|b| **b == byte).count();
                assert_eq!(
                    (count(b'x'), count(b'>'), count(b'\n')),
                    (len, lines, lines)
                );
            }
        }
    }

    #[test]
    fn the_last_lines_are_kept() {
        let mut lines = Lines::new("> ");
        for i in 0..100 {
            lines.push(format!("{i}\n").as_bytes());
        }
        lines.push(&vec![b'x'; LONGEST]);
        lines.finish();
        let last = lines.into_last();
        assert_eq!(last.len(), KEPT);
        assert_eq!(last[0], "91");
        assert_eq!(last[KEPT - 1], "x".repeat(KEPT_BYTES));
    }
}
