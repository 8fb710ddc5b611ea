//! A free TCP port for `MASTER_PORT`.

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};

use nix::sys::socket::sockopt::ReuseAddr;
use nix::sys::socket::{
    AddressFamily, SockFlag, SockType, SockaddrIn, bind, getsockname, setsockopt, socket,
};

/// A port that nobody has, and that the system gives to nobody who asks for any port as long as this lives. Who asks for this
/// very port with `SO_REUSEADDR`, as servers do (`TcpListener::bind`, PyTorch's TCPStore), gets it: the socket is bound, but
/// does not listen.
pub struct ReservedPort {
    port: u16,
    _socket: OwnedFd,
}

impl ReservedPort {
    pub fn new() -> nix::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Inet, SockType::Stream, flags, None)?;
        setsockopt(&socket, ReuseAddr, &true)?;
        let any = SockaddrIn::from(std::net::SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0));
        bind(socket.as_raw_fd(), &any)?;
        let bound: SockaddrIn = getsockname(socket.as_raw_fd())?;
        Ok(Self {
            port: bound.port(),
            _socket: socket,
        })
    }

    pub fn port(&self) -> u16 {
        self.port
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn rank_0_can_listen_at_a_reserved_port_and_nobody_else_is_given_it()
    -> Result<(), Box<dyn std::error::Error>> {
        let reserved: Vec<ReservedPort> = (0..50)
            .map(|_| ReservedPort::new())
            .collect::<Result<_, _>>()?;
        let mut ports: Vec<u16> = reserved.iter().map(ReservedPort::port).collect();
        let any: Vec<TcpListener> = (0..50)
            .map(|_| TcpListener::bind("0.0.0.0:0"))
            .collect::<Result<_, _>>()?;
        for listener in &any {
            ports.push(listener.local_addr()?.port());
        }
        ports.sort_unstable();
        ports.dedup();
        assert_eq!(ports.len(), 100, "one port, given twice");
        for reserved in &reserved {
            for host in ["127.0.0.1", "0.0.0.0"] {
                let listener = TcpListener::bind((host, reserved.port()))?;
                std::net::TcpStream::connect(("127.0.0.1", reserved.port()))?;
                listener.accept()?;
            }
        }
        Ok(())
    }
}
