//! TCP congestion control algorithms, set per socket.

use socket2::{Domain, SockRef, Socket, Type};
use std::fmt;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::str::FromStr;

/// The name of a congestion control algorithm, as `net.ipv4.tcp_available_congestion_control` lists
/// it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Congestion(String);

impl Congestion {
    /// The algorithm of new sockets; `None` if it is unknown.
    #[must_use]
    pub fn system_default() -> Option<Congestion> {
        sysctl("tcp_congestion_control")?.parse().ok()
    }

    /// The algorithm of a TCP socket.
    #[must_use]
    pub fn of(socket: &impl AsFd) -> Option<Congestion> {
        let name = SockRef::from(socket).tcp_congestion().ok()?;
        // The kernel pads with NUL.
        std::str::from_utf8(&name).ok()?.trim_end_matches('\0').parse().ok()
    }

    /// The kernel's name for it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Whether the algorithm paces segments by timers. It does so on loopback too, which distorts
    /// measurements there.
    #[must_use]
    pub fn paces(&self) -> bool {
        self.0.starts_with("bbr")
    }

    /// Sets the algorithm of a TCP socket. Sockets that a listener accepts inherit it. Call it
    /// before the socket connects: a socket connected with `bbr` stays paced whatever is set later.
    ///
    /// # Errors
    /// As `setsockopt(2)`, `TCP_CONGESTION`.
    pub fn set_for(&self, socket: &impl AsFd) -> io::Result<()> {
        SockRef::from(socket).set_tcp_congestion(self.0.as_bytes())
    }

    /// Checks that this process may use the algorithm.
    ///
    /// # Errors
    /// A message with the reason and a remedy.
    pub fn check(&self) -> Result<(), String> {
        let set = || self.set_for(&Socket::new(Domain::IPV4, Type::STREAM.cloexec(), None)?);
        set().map_err(|error| self.refusal(&error, |name| sysctl(name).unwrap_or_default()))
    }

    fn refusal(&self, error: &io::Error, sysctl: impl Fn(&str) -> String) -> String {
        match error.raw_os_error() {
            Some(libc::ENOENT) => format!(
                "this kernel has no congestion control {self}; it has {}. Load its module (modprobe tcp_{self}), or name \
                 another",
                sysctl("tcp_available_congestion_control")
            ),
            Some(libc::EPERM) => {
                let allowed = sysctl("tcp_allowed_congestion_control");
                format!(
                    "this process may only use {allowed}; run it as root, or allow {self} with sysctl -w \
                     net.ipv4.tcp_allowed_congestion_control=\"{allowed} {self}\""
                )
            }
            _ => format!("cannot set congestion control {self}: {error}"),
        }
    }
}

impl fmt::Display for Congestion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Congestion {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Congestion, &'static str> {
        let is_name_char = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
        if text.is_empty() || text.len() > MAX_NAME || !text.chars().all(is_name_char) {
            return Err("name a TCP congestion control, such as cubic, reno or bbr");
        }
        Ok(Congestion(text.to_owned()))
    }
}

fn sysctl(name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/sys/net/ipv4/{name}")).ok()?;
    Some(text.trim().to_owned())
}

/// `TCP_CA_NAME_MAX`, without the NUL.
const MAX_NAME: usize = 15;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::socket::{Address, Listener, Stream};

    #[test]
    fn both_ends_of_a_connection_use_the_configured_algorithm() {
        // Every kernel has `reno`, and every user may choose it.
        let reno: Congestion = "reno".parse().unwrap();
        reno.check().unwrap();
        let any_port = Address::Tcp("127.0.0.1:0".parse().unwrap());
        let listener = Listener::bind_with(&any_port, Some(&reno)).unwrap();
        let client = Stream::connect_with(listener.address(), Some(&reno)).unwrap();
        let server = loop {
            match listener.accept() {
                Ok(server) => break server,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        };
        let reno = Some(reno);
        assert_eq!((Congestion::of(&server), Congestion::of(&client)), (reno.clone(), reno));
    }

    #[test]
    fn a_unix_socket_has_no_congestion_control() {
        let reno: Congestion = "reno".parse().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let listener = Listener::bind_with(&Address::Unix(dir.path().join("socket")), Some(&reno)).unwrap();
        Stream::connect_with(listener.address(), Some(&reno)).unwrap();
    }

    #[test]
    fn an_unusable_algorithm_is_refused_with_a_remedy() {
        let name: Congestion = "nosuch".parse().unwrap();
        let error = name.check().unwrap_err();
        assert!(error.starts_with("this kernel has no congestion control nosuch; it has "), "{error}");
        let forbidden = io::Error::from_raw_os_error(libc::EPERM);
        assert_eq!(
            name.refusal(&forbidden, |_| "reno cubic".to_owned()),
            "this process may only use reno cubic; run it as root, or allow nosuch with sysctl -w \
             net.ipv4.tcp_allowed_congestion_control=\"reno cubic nosuch\""
        );
        for wrong in ["", "a b", "sixteen-letters-", "cubic\n"] {
            assert!(wrong.parse::<Congestion>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn every_version_of_bbr_paces_and_cubic_does_not() {
        let paces = |name: &str| name.parse::<Congestion>().unwrap().paces();
        assert!(paces("bbr") && paces("bbr2") && !paces("cubic") && !paces("reno"));
    }
}
