//! URLs of disks: `aoe://IFACE/eSHELF.SLOT`, with several interfaces as `aoe://IFACE,IFACE/eSHELF.SLOT`, and
//! `aoe://IFACE` for all that answer there. `?reconnect=SECONDS` is how long I/O waits for a disk that does not answer.

use super::Address;
use std::fmt;

/// What a URL names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Url {
    /// Network interfaces, at least one.
    pub interfaces: Vec<String>,
    /// One disk, or whatever is there.
    pub address: Option<Address>,
    /// In seconds.
    pub reconnect: Option<u32>,
}

/// What is wrong with a URL.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// It is none.
    #[error("a disk's URL is aoe://IFACE/eSHELF.SLOT")]
    Form,
    /// No interface has such a name.
    #[error("\"{0}\" is no name of a network interface")]
    Interface(String),
    /// The path is no disk.
    #[error("\"{0}\": {1}")]
    Address(String, super::address::AddressError),
    /// A parameter that there is not.
    #[error("there is no parameter \"{0}\" (there is reconnect=SECONDS)")]
    Parameter(String),
    /// No number of seconds.
    #[error("\"{0}\" is no number of seconds")]
    Seconds(String),
}

impl Url {
    /// Reads a URL.
    ///
    /// # Errors
    /// If it is none.
    pub fn parse(text: &str) -> Result<Url, UrlError> {
        let (scheme, rest) = text.split_once("://").ok_or(UrlError::Form)?;
        if !scheme.eq_ignore_ascii_case("aoe") {
            return Err(UrlError::Form);
        }
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (interfaces, path) = place.split_once('/').unwrap_or((place, ""));
        let interfaces: Vec<String> = interfaces.split(',').map(str::to_owned).collect();
        if let Some(wrong) = interfaces.iter().find(|name| !is_interface(name)) {
            return Err(UrlError::Interface(wrong.clone()));
        }
        let address = match path {
            "" => None,
            path => Some(path.parse().map_err(|error| UrlError::Address(path.to_owned(), error))?),
        };
        let mut reconnect = None;
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
            if name != "reconnect" {
                return Err(UrlError::Parameter(name.to_owned()));
            }
            reconnect = Some(value.parse().map_err(|_| UrlError::Seconds(value.to_owned()))?);
        }
        Ok(Url { interfaces, address, reconnect })
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "aoe://{}", self.interfaces.join(","))?;
        if let Some(address) = self.address {
            write!(f, "/{address}")?;
        }
        self.reconnect.map_or(Ok(()), |seconds| write!(f, "?reconnect={seconds}"))
    }
}

/// As the kernel has it: 1 to 15 bytes, no slash, no space, and not a directory's own names.
fn is_interface(name: &str) -> bool {
    let is_sane = |byte: u8| byte.is_ascii_graphic() && byte != b'/' && byte != b':';
    (1..=15).contains(&name.len()) && name.bytes().all(is_sane) && name != "." && name != ".."
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_reads_as_it_is_written() {
        for text in ["aoe://eth0/e1.2", "aoe://eth0", "aoe://a,b.5/e0.0?reconnect=5", "aoe://lo?reconnect=1"]
        {
            assert_eq!(Url::parse(text).unwrap().to_string(), text);
        }
        assert_eq!(Url::parse("AOE://eth0/").unwrap().to_string(), "aoe://eth0");
    }

    #[test]
    fn what_is_wrong_with_a_url_is_said() {
        let all = [
            ("eth0/e1.2", "a disk's URL is"),
            ("nbd://eth0/e1.2", "a disk's URL is"),
            ("aoe:///e1.2", "no name of a network interface"),
            ("aoe://eth0,,eth1/e1.2", "no name of a network interface"),
            ("aoe://an-interface-of-17/e1.2", "no name of a network interface"),
            ("aoe://eth0/1.2", "eSHELF.SLOT"),
            ("aoe://eth0/e1.2?x=1", "no parameter \"x\""),
            ("aoe://eth0/e1.2?reconnect=-1", "no number of seconds"),
        ];
        for (text, says) in all {
            let error = Url::parse(text).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
