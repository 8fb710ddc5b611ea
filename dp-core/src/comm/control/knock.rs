//! How ranks other than 0 come to the meeting.

use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::frame::{self, Inbox};
use super::protocol::{Answer, Hello};
use super::{Place, rendezvous_error};
use crate::error::Result;

/// Pause before another try: rank 0 may not have started.
const PAUSE: Duration = Duration::from_millis(50);
/// The longest that one address is tried.
const TRY: Duration = Duration::from_secs(5);
/// How long a look for an answer lasts.
const LOOK: Duration = Duration::from_millis(200);
/// How much longer than rank 0 another rank waits, so that rank 0's own message, which names the missing ranks, comes through.
const GRACE: Duration = Duration::from_secs(1);

/// Registers with rank 0, and returns with the connection and with what rank 0 has for all, once all have come.
pub(super) fn knock(
    place: &Place,
    hello: &Hello,
    deadline: Instant,
) -> Result<(TcpStream, Inbox, Vec<u8>)> {
    let start = Instant::now();
    let deadline = deadline + GRACE;
    let fail = |message| Err(rendezvous_error(hello.rank, place, message));
    let mut trouble = String::from("it was not reached");
    // Ranks that rank 0 has missed, if it has let us in.
    let mut missing: Option<Vec<usize>> = None;
    while Instant::now() < deadline {
        let stream = match connect(place, deadline).and_then(|stream| greet(stream, hello)) {
            Ok(stream) => stream,
            Err(e) => {
                trouble = e.to_string();
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        let mut inbox = Inbox::default();
        let ended = loop {
            if Instant::now() >= deadline {
                break None;
            }
            match inbox.next(&stream) {
                Ok(Some(Answer::Waiting { missing: ranks })) => missing = Some(ranks),
                Ok(Some(Answer::Refused { reason })) => return fail(reason),
                Ok(Some(Answer::Welcome { payload })) => return Ok((stream, inbox, payload)),
                Ok(None) => trouble = "it says nothing".to_string(),
                Err(e) if e.kind() == ErrorKind::InvalidData => {
                    return fail(format!(
                        "something else than rank 0 of this program listens there: {e}; choose another MASTER_PORT, and start \
                         all ranks from the same build"
                    ));
                }
                Err(e) => break Some(e),
            }
        };
        match (ended, &missing) {
            (Some(e), Some(_)) => {
                return fail(format!(
                    "rank 0 was there, and has gone before all ranks had come ({e}); look at what it printed"
                ));
            }
            // A listener of an earlier run that ends just now, or somebody else who does not like our first words.
            (Some(e), None) => {
                trouble = format!("it ends the connection without an answer ({e})");
                std::thread::sleep(PAUSE);
            }
            (None, _) => {}
        }
    }
    let waited = start.elapsed();
    match missing {
        Some(missing) => fail(format!(
            "waited {waited:?} for all ranks; not there: rank {}; look for processes that have not started",
            list(&missing)
        )),
        None => fail(format!(
            "rank 0 has not answered within {waited:?}; the last try: {trouble}; is this the host of rank 0 (MASTER_ADDR), is \
             the port open to it (MASTER_PORT), has rank 0 started?"
        )),
    }
}

/// Connects to whatever address of the host answers.
fn connect(place: &Place, deadline: Instant) -> io::Result<TcpStream> {
    // The resolver has deadlines of its own.
    let addresses: Vec<SocketAddr> = (place.host.as_str(), place.port)
        .to_socket_addrs()
        .map_err(|e| io::Error::new(e.kind(), format!("the host name is unknown: {e}")))?
        .collect();
    let mut failure = io::Error::new(ErrorKind::NotFound, "the host has no address");
    for address in addresses {
        let rest = deadline.saturating_duration_since(Instant::now());
        match TcpStream::connect_timeout(&address, rest.clamp(LOOK, TRY)) {
            Ok(stream) if is_own(&stream) => {
                failure = io::Error::new(ErrorKind::ConnectionRefused, "nobody listens");
            }
            Ok(stream) => return Ok(stream),
            Err(e) => failure = e,
        }
    }
    Err(failure)
}

fn greet(stream: TcpStream, hello: &Hello) -> io::Result<TcpStream> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(LOOK))?;
    stream.set_write_timeout(Some(TRY))?;
    frame::send(&stream, hello)?;
    Ok(stream)
}

pub(super) fn list(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
    names.join(", ")
}

/// On one host, a connection to a port that nobody listens at may meet itself, when the system chooses that very port for our
/// end of it.
fn is_own(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(a), Ok(b)) if a == b)
}
