//! How rank 0 gathers all ranks.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use super::frame::{self, Inbox};
use super::knock::list;
use super::protocol::{Answer, Hello, PROTOCOL};
use super::{Place, rendezvous_error};
use crate::error::Result;

/// Pause between two looks.
const PAUSE: Duration = Duration::from_millis(5);
/// How long somebody who has connected may take to say who he is.
const MANNERS: Duration = Duration::from_secs(10);
/// How long those who come when it is too late are still told why.
const FAREWELL: Duration = Duration::from_secs(2);
/// How often those who wait are told for whom.
const NOTICE: Duration = Duration::from_secs(1);

/// Somebody who has connected.
struct Guest {
    stream: TcpStream,
    address: SocketAddr,
    inbox: Inbox,
    since: Instant,
}

/// A rank that has registered.
struct Registered {
    guest: Guest,
    hello: Hello,
}

/// What becomes of a guest.
enum Verdict {
    /// It is no rank of this job, and this job goes on.
    Stranger(String),
    /// It is, and the job cannot begin.
    Fatal(String),
}

/// Listens until all ranks have registered; returns the connections of ranks 1, 2, ...
pub(super) fn listen(
    place: &Place,
    own: &Hello,
    payload: &[u8],
    deadline: Instant,
) -> Result<Vec<(TcpStream, Inbox)>> {
    let fail = |message| rendezvous_error(0, place, message);
    if own.world_size == 1 {
        return Ok(Vec::new());
    }
    let listener = bind(place).map_err(|e| {
        fail(match e.kind() {
            ErrorKind::AddrInUse => "the port is in use, by another job or another program; choose another MASTER_PORT, the \
                                     same for all ranks"
                .to_string(),
            _ => format!("cannot listen there: {e}; choose another MASTER_PORT, or correct MASTER_ADDR"),
        })
    })?;
    let mut hall = Hall {
        own,
        guests: Vec::new(),
        registered: (0..own.world_size).map(|_| None).collect(),
        strangers: None,
    };
    if let Err(reason) = hall.gather(&listener, deadline) {
        let answer = Answer::Refused {
            reason: reason.clone(),
        };
        hall.tell_all(&answer);
        hall.send_home(&listener, &answer, deadline);
        return Err(fail(reason));
    }
    hall.tell_all(&Answer::Welcome {
        payload: payload.to_vec(),
    });
    let all = hall.registered.into_iter().flatten();
    Ok(all.map(|r| (r.guest.stream, r.guest.inbox)).collect())
}

/// All addresses of this host, unless the place is one that only this host can reach.
fn bind(place: &Place) -> io::Result<TcpListener> {
    let literal = place.host.parse::<IpAddr>();
    let only_here = place.host == "localhost" || literal.as_ref().is_ok_and(IpAddr::is_loopback);
    let listener = match (only_here, literal) {
        (true, Ok(ip)) => TcpListener::bind((ip, place.port)),
        (true, Err(_)) => TcpListener::bind((Ipv4Addr::LOCALHOST, place.port)),
        // Both families, where the host has both; a port in use is in use in both.
        (false, _) => match TcpListener::bind((Ipv6Addr::UNSPECIFIED, place.port)) {
            Err(e) if e.kind() != ErrorKind::AddrInUse => {
                TcpListener::bind((Ipv4Addr::UNSPECIFIED, place.port))
            }
            result => result,
        },
    }?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Who is there.
struct Hall<'a> {
    own: &'a Hello,
    guests: Vec<Guest>,
    /// By rank; rank 0 is here.
    registered: Vec<Option<Registered>>,
    /// The last one who was sent away, and why.
    strangers: Option<String>,
}

impl Hall<'_> {
    fn gather(&mut self, listener: &TcpListener, deadline: Instant) -> Result<(), String> {
        let start = Instant::now();
        let mut noticed = start;
        loop {
            self.accept(listener);
            self.hear_guests()?;
            self.look_after_registered()?;
            let missing = self.missing();
            if missing.is_empty() {
                return Ok(());
            }
            if Instant::now() >= deadline {
                let strangers = self.strangers.take();
                let strangers = strangers.map_or(String::new(), |s| format!(" ({s})"));
                return Err(format!(
                    "waited {:?} for all {} ranks; not there: rank {}{strangers}; look for processes that have not started or do \
                     not reach this port, or raise the timeout of the World",
                    start.elapsed(),
                    self.own.world_size,
                    list(&missing)
                ));
            }
            if noticed.elapsed() >= NOTICE {
                noticed = Instant::now();
                self.tell_all(&Answer::Waiting { missing });
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn missing(&self) -> Vec<usize> {
        let absent = |r: &usize| self.registered[*r].is_none();
        (1..self.own.world_size).filter(absent).collect()
    }

    fn accept(&mut self, listener: &TcpListener) {
        // An error is one of the connection that was to come, not of the listener.
        while let Ok((stream, address)) = listener.accept() {
            let prepared = stream
                .set_nonblocking(true)
                .and_then(|()| stream.set_nodelay(true));
            if prepared.is_ok() {
                self.guests.push(Guest {
                    stream,
                    address,
                    inbox: Inbox::default(),
                    since: Instant::now(),
                });
            }
        }
    }

    fn hear_guests(&mut self) -> Result<(), String> {
        let mut index = 0;
        while index < self.guests.len() {
            let guest = &mut self.guests[index];
            let said = guest.inbox.next::<Hello>(&guest.stream);
            let is_late = guest.since.elapsed() >= MANNERS;
            let trouble = match said {
                Ok(None) if !is_late => {
                    index += 1;
                    continue;
                }
                Ok(Some(hello)) => {
                    let guest = self.guests.swap_remove(index);
                    self.register(guest, hello)?;
                    continue;
                }
                Ok(None) => "said nothing".to_string(),
                Err(e) => format!("is no rank: {e}"),
            };
            let guest = self.guests.swap_remove(index);
            self.send_away(format!("{} {trouble}", guest.address));
        }
        Ok(())
    }

    fn send_away(&mut self, who: String) {
        tracing::warn!("rank 0, waiting for the other ranks: {who}");
        self.strangers = Some(format!("sent away: {who}"));
    }

    fn register(&mut self, guest: Guest, hello: Hello) -> Result<(), String> {
        let verdict = match self.judge(&guest, &hello) {
            Ok(()) => {
                let missing = self.missing();
                let missing = missing.into_iter().filter(|r| *r != hello.rank).collect();
                let rank = hello.rank;
                // Said at once, so that it knows it has come to the right place. If it has gone, we will see.
                let _ = frame::send(&guest.stream, &Answer::Waiting { missing });
                self.registered[rank] = Some(Registered { guest, hello });
                return Ok(());
            }
            Err(verdict) => verdict,
        };
        let (reason, is_fatal) = match verdict {
            Verdict::Stranger(reason) => (reason, false),
            Verdict::Fatal(reason) => (reason, true),
        };
        let answer = Answer::Refused {
            reason: reason.clone(),
        };
        // It cannot be told if it has gone; here it is said in any case.
        let _ = frame::send(&guest.stream, &answer);
        if is_fatal {
            return Err(reason);
        }
        self.send_away(reason);
        Ok(())
    }

    /// Whether `hello` is of a rank that is expected.
    fn judge(&self, guest: &Guest, hello: &Hello) -> Result<(), Verdict> {
        let (own, rank, from) = (self.own, hello.rank, guest.address);
        if hello.job != own.job {
            let name = |job: &str| match job {
                "" => "a job without a name".to_string(),
                job => format!("job {job}"),
            };
            return Err(Verdict::Stranger(format!(
                "rank {rank} at {from} is of {}, but rank 0 here is of {}: two jobs use this port; choose another MASTER_PORT \
                 for one of them",
                name(&hello.job),
                name(&own.job)
            )));
        }
        let fatal = |text: String| Err(Verdict::Fatal(text));
        if hello.protocol != PROTOCOL || hello.version != own.version {
            return fatal(format!(
                "rank {rank} at {from} runs dp-core {} (protocol {}), rank 0 runs {} (protocol {PROTOCOL}); start all ranks \
                 from the same build",
                hello.version, hello.protocol, own.version
            ));
        }
        if hello.world_size != own.world_size {
            return fatal(format!(
                "rank {rank} at {from} counts {} ranks, rank 0 counts {}; WORLD_SIZE must be the same for all, and two jobs \
                 need two ports",
                hello.world_size, own.world_size
            ));
        }
        if hello.run != own.run {
            return fatal(format!(
                "rank {rank} at {from} is in run {} of its program, rank 0 in run {}; every rank must call World::run equally \
                 often",
                hello.run + 1,
                own.run + 1
            ));
        }
        if rank >= own.world_size {
            return fatal(format!(
                "{from} claims to be rank {rank}, but ranks are below WORLD_SIZE={}",
                own.world_size
            ));
        }
        if rank == 0 {
            return fatal(format!(
                "{from} claims to be rank 0, too; RANK must differ for each process"
            ));
        }
        if let Some(other) = &self.registered[rank] {
            return fatal(format!(
                "rank {rank} has come twice, from {} and from {from}; RANK must differ for each process, and two jobs need two \
                 ports",
                other.guest.address
            ));
        }
        let others = self.registered.iter().flatten().map(|r| &r.hello);
        let mut others = std::iter::once(own).chain(others);
        if let Some(device) = &hello.device
            && let Some(other) = others.find(|o| o.device.as_ref() == Some(device))
        {
            return fatal(format!(
                "ranks {} and {rank} both have {device}; NCCL needs a GPU for each rank: start one process per GPU, with \
                 another LOCAL_RANK each",
                other.rank
            ));
        }
        Ok(())
    }

    /// A rank that has registered waits, and says nothing.
    fn look_after_registered(&mut self) -> Result<(), String> {
        for (rank, registered) in self.registered.iter_mut().enumerate() {
            let Some(Registered { guest, .. }) = registered else {
                continue;
            };
            let problem = match guest.inbox.next::<Hello>(&guest.stream) {
                Ok(None) => continue,
                Ok(Some(_)) => "it speaks out of turn".to_string(),
                Err(e) if e.kind() == ErrorKind::UnexpectedEof => {
                    "it has closed the connection".to_string()
                }
                Err(e) => e.to_string(),
            };
            return Err(format!(
                "rank {rank} at {} has come, and gone before all ranks had ({problem}); look at what it printed",
                guest.address
            ));
        }
        Ok(())
    }

    /// Tells why the job cannot begin to the ranks that have not come yet, for a while: without it, they would wait for their
    /// deadline at a port where nobody listens.
    fn send_home(&mut self, listener: &TcpListener, answer: &Answer, deadline: Instant) {
        let until = deadline.min(Instant::now() + FAREWELL);
        let (num_missing, mut num_told) = (self.missing().len(), 0);
        while num_told < num_missing && Instant::now() < until {
            self.accept(listener);
            self.guests.retain_mut(|guest| {
                let said = guest.inbox.next::<Hello>(&guest.stream);
                if let Ok(Some(_)) = said {
                    // If it has gone, it need not know.
                    let _ = frame::send(&guest.stream, answer);
                    num_told += 1;
                }
                matches!(said, Ok(None))
            });
            std::thread::sleep(PAUSE);
        }
    }

    fn tell_all(&self, answer: &Answer) {
        for Registered { guest, .. } in self.registered.iter().flatten() {
            // Small messages, which the system takes without waiting. A rank that has gone is found by the next look.
            let _ = frame::send(&guest.stream, answer);
        }
    }
}
