//! Messages on a TCP stream: four bytes that say whose they are, four of length (little endian), JSON.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;

use serde::Serialize;
use serde::de::DeserializeOwned;

/// So that a stranger on the port is told from a rank by its first bytes.
const MAGIC: [u8; 4] = *b"dpc1";
const HEADER: usize = 8;
/// No message is longer, so nobody makes us allocate more. The longest ones carry the names of a bucket's parameters.
const LONGEST: usize = 4 << 20;

/// Sends one message, whole.
pub(super) fn send(mut stream: &TcpStream, message: &impl Serialize) -> io::Result<()> {
    let text = serde_json::to_vec(message)?;
    if text.len() > LONGEST {
        let long = format!("a control message of {} bytes is too long", text.len());
        return Err(io::Error::new(ErrorKind::InvalidInput, long));
    }
    let mut frame = Vec::with_capacity(HEADER + text.len());
    frame.extend(MAGIC);
    frame.extend((text.len() as u32).to_le_bytes());
    frame.extend(text);
    stream.write_all(&frame)
}

/// Puts messages together from what arrives, also if that is a byte at a time.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    bytes: Vec<u8>,
}

impl Inbox {
    /// The next message. `None` where the stream has no more to give now: it is non-blocking, or its read timeout is over.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidData`] for what is no message of ours; [`ErrorKind::UnexpectedEof`] at the end of the stream.
    pub fn next<T: DeserializeOwned>(&mut self, mut stream: &TcpStream) -> io::Result<Option<T>> {
        let mut piece = [0; 4096];
        loop {
            if let Some(message) = self.take()? {
                return Ok(Some(message));
            }
            match stream.read(&mut piece) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(num) => self.bytes.extend(&piece[..num]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // Which of both a timeout is depends on the system.
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Ok(None);
                }
                Err(e) => return Err(e),
            }
        }
    }

    fn take<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        let foreign = |what: String| Err(io::Error::new(ErrorKind::InvalidData, what));
        let begin = &self.bytes[..self.bytes.len().min(MAGIC.len())];
        if *begin != MAGIC[..begin.len()] {
            return foreign(format!(
                "it begins with {:?}",
                begin.escape_ascii().to_string()
            ));
        }
        let Some(header) = self.bytes.first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let [_, _, _, _, length @ ..] = *header;
        let length = u32::from_le_bytes(length) as usize;
        if length > LONGEST {
            return foreign(format!("a message of {length} bytes"));
        }
        let Some(text) = self.bytes.get(HEADER..HEADER + length) else {
            return Ok(None);
        };
        let message = serde_json::from_slice(text);
        self.bytes.drain(..HEADER + length);
        match message {
            Ok(message) => Ok(Some(message)),
            Err(e) => foreign(format!(
                "a message that this version does not understand ({e})"
            )),
        }
    }
}
