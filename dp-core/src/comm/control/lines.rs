//! The connections of one process, each with the thread that reads from it.

use std::io;
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::coordinator::{Coordinator, Outlet};
use super::frame::{self, Inbox};
use super::protocol::{News, Report};
use super::view::View;

/// How long rank 0 waits for the others to read the last words, before it breaks the connections.
const LAST_WORDS: Duration = Duration::from_secs(5);

/// Reads until the connection ends, which is what ends the thread; returns why it did.
fn read<T: serde::de::DeserializeOwned>(
    stream: &TcpStream,
    mut inbox: Inbox,
    mut hear: impl FnMut(T),
) -> String {
    loop {
        match inbox.next(stream) {
            Ok(Some(message)) => hear(message),
            // It has no read timeout.
            Ok(None) => {}
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => {
                return "it has closed the connection".to_string();
            }
            Err(e) => return e.to_string(),
        }
    }
}

/// A rank's connection to rank 0.
#[derive(Debug)]
pub(super) struct Line {
    /// Locked, so that messages of two threads do not mix.
    stream: Mutex<TcpStream>,
    reader: Option<JoinHandle<()>>,
}

impl Line {
    pub fn open(view: &Arc<View>, stream: TcpStream, inbox: Inbox) -> io::Result<Self> {
        let (view, ear) = (Arc::clone(view), stream.try_clone()?);
        let reader = std::thread::Builder::new()
            .name("control".to_string())
            .spawn(move || {
                let why = read(&ear, inbox, |news: News| view.hear(news));
                view.lost_rank_0(&why);
            })?;
        Ok(Self {
            stream: Mutex::new(stream),
            reader: Some(reader),
        })
    }

    pub fn send(&self, report: &Report) -> io::Result<()> {
        frame::send(&self.stream.lock(), report)
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        // Ends the thread, too.
        let _ = self.stream.lock().shutdown(Shutdown::Both);
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
    }
}

/// Rank 0's connections to all others.
#[derive(Debug)]
pub(super) struct Lines {
    coordinator: Arc<Coordinator>,
    readers: Vec<JoinHandle<()>>,
}

impl Lines {
    /// `streams` are those of ranks 1, 2, ..., each with what has already been read from it.
    pub fn open(
        view: &Arc<View>,
        streams: Vec<(TcpStream, Inbox)>,
    ) -> io::Result<(Arc<Coordinator>, Self)> {
        let mut outlets = vec![Outlet::Here(Arc::clone(view))];
        let mut ears = Vec::with_capacity(streams.len());
        for (stream, inbox) in streams {
            ears.push((stream.try_clone()?, inbox));
            outlets.push(Outlet::There(stream));
        }
        let coordinator = Coordinator::new(outlets);
        // Made first, so that an error on the way ends the threads that are there.
        let mut lines = Self {
            coordinator: Arc::clone(&coordinator),
            readers: Vec::with_capacity(ears.len()),
        };
        for (rank, (ear, inbox)) in (1..).zip(ears) {
            let coordinator = Arc::clone(&coordinator);
            let reader = std::thread::Builder::new()
                .name(format!("control {rank}"))
                // It decodes small messages, and there may be many of it.
                .stack_size(256 << 10)
                .spawn(move || {
                    let why = read(&ear, inbox, |report: Report| {
                        coordinator.hear(rank, report);
                    });
                    coordinator.lost(rank, &why);
                })?;
            lines.readers.push(reader);
        }
        Ok((coordinator, lines))
    }
}

impl Drop for Lines {
    /// The others may still have to read how the run has ended: they are told that nothing more comes, and hang up themselves.
    fn drop(&mut self) {
        self.coordinator.hang_up(Shutdown::Write);
        let until = Instant::now() + LAST_WORDS;
        while Instant::now() < until && !self.readers.iter().all(JoinHandle::is_finished) {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.coordinator.hang_up(Shutdown::Both);
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
    }
}
