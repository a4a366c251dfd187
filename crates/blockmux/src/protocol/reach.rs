//! Connecting to servers by URL.

use crate::failure::Failure;
use crate::protocol::{PROTOCOLS, Remote};
use blockmux_engine::carrier::blocking::BlockingConnectError;
use blockmux_engine::net::socket::Address;
use blockmux_engine::net::zone;
use blockmux_proto::iscsi::url::{HostPort, MAX_PORTALS, Portals};
use blockmux_volume::spec;
use std::fmt::Display;
use std::net::ToSocketAddrs;
use std::str::FromStr;
use std::time::Duration;
use tracing::warn;

/// Parses the URL of a remote volume, apart from its block sizes.
pub(crate) fn of_url(url: &str) -> Result<Box<dyn Remote>, Failure> {
    let shown = spec::Url::new(url);
    let without = shown.without_block_sizes();
    let url = without.as_written();
    let wrong = |what: String| {
        let shown = spec::with_hidden_secrets(shown.as_written());
        Failure::request(format!("{shown}: {what}; {}", url_forms()))
    };
    let Some((scheme, _)) = url.split_once("://") else { return Err(wrong("is not a URL".to_owned())) };
    let scheme = scheme.to_ascii_lowercase();
    let found = PROTOCOLS.iter().find(|protocol| {
        let mut known = protocol.schemes.iter().map(|(known, _)| known).chain(protocol.unsupported_schemes);
        known.any(|known| *known == scheme)
    });
    match found {
        Some(protocol) => (protocol.remote)(url),
        None => Err(wrong(format!("no protocol has the URL scheme `{scheme}`"))),
    }
}

/// Parses a URL of one protocol.
pub(crate) fn read<U: FromStr<Err: Display>>(url: &str) -> Result<U, Failure> {
    url.parse().map_err(|error: U::Err| {
        // The error of the same URL with other secrets quotes none.
        let shown = spec::with_hidden_secrets(url);
        let why = match shown == url {
            true => error.to_string(),
            false => {
                shown.parse::<U>().err().map_or_else(|| INVALID_SECRET.to_owned(), |error| error.to_string())
            }
        };
        Failure::request(format!("{shown}: {why}"))
    })
}

/// Resolves a portal to all of its addresses.
pub(crate) fn addresses(url: impl Display, (host, port): &HostPort) -> Result<Vec<Address>, Failure> {
    let found = (host.as_str(), *port)
        .to_socket_addrs()
        .map_err(|_| Failure::request(format!("{url}: cannot find host `{host}`; check its name")))?;
    let (without, usable): (Vec<_>, Vec<_>) = found.partition(zone::lacks_zone);
    if usable.is_empty() && !without.is_empty() {
        return Err(Failure::request(format!(
            "{url}: `{host}` is an address of one link; name the interface, as in [{host}%25eth0]"
        )));
    }
    Ok(usable.into_iter().map(Address::Tcp).collect())
}

/// The other paths: the first address of each other portal, then the addresses in `found`, up to
/// the maximum.
pub(crate) fn further(
    url: impl Display,
    portals: &Portals,
    found: impl IntoIterator<Item = Address>,
) -> Result<Vec<Address>, Failure> {
    let mut further = Vec::new();
    for portal in &portals.further {
        further.extend(addresses(&url, portal)?.into_iter().next());
    }
    for address in found {
        if further.len() < MAX_PORTALS && !further.contains(&address) {
            further.push(address);
        }
    }
    Ok(further)
}

/// All paths except `address`, up to the maximum.
pub(crate) fn beside(address: &Address, further: &[Address]) -> Vec<Address> {
    let others = further.iter().filter(|other| *other != address).take(MAX_PORTALS.saturating_sub(1));
    others.cloned().collect()
}

/// The error for a URL without a volume; `path` is the syntax of the missing part.
pub(crate) fn names_no(what: &str, url: impl Display, path: &str) -> Failure {
    let url = url.to_string();
    let (place, query) = url.split_at(url.find('?').unwrap_or(url.len()));
    Failure::request(format!(
        "{url}: names no {what}; use {place}/{path}{query}, as listed by `blockmux discover {url}`"
    ))
}

/// Warns once of names in a server's list that violate the standards; they are used as they are.
pub(crate) fn warn_of_names<'a, V: Display>(mut odd: impl Iterator<Item = (&'a str, V)>) {
    let Some((name, violation)) = odd.next() else { return };
    match odd.count() {
        0 => warn!("`{name}`: {violation}; it is used as it is"),
        more => warn!("`{name}`: {violation}; it is used as it is, and so are {more} more such names"),
    }
}

/// Converts a timeout of a URL, in which 0 means no limit.
pub(crate) fn timeout(time: Duration) -> Option<Duration> {
    (!time.is_zero()).then_some(time)
}

/// Tries the addresses of a server in order until one answers, even with a refusal; the last error
/// if none can be reached.
pub(crate) fn ask_each<T, R>(
    url: impl Display,
    addresses: &[Address],
    mut ask: impl FnMut(&Address) -> Result<T, BlockingConnectError<R>>,
) -> Result<Result<T, BlockingConnectError<R>>, Failure> {
    let mut last = None;
    for address in addresses {
        match ask(address) {
            Err(error @ BlockingConnectError::Broken { .. }) => last = Some(Err(error)),
            answer => return Ok(answer),
        }
    }
    last.ok_or_else(|| Failure::request(format!("{url}: the host has no address; check its name")))
}

/// The problem of a URL that would be valid with another secret.
const INVALID_SECRET: &str = "the secret is invalid; put it in a file and give secret_file=PATH";

/// The syntax of URLs, for error messages.
fn url_forms() -> String {
    let forms: Vec<&str> = PROTOCOLS.iter().flat_map(|protocol| protocol.url_forms).copied().collect();
    format!("use {}", forms.join(" or "))
}
