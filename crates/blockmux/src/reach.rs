//! From a URL to a server that answers.

use crate::failure::Failure;
use crate::protocol::{PROTOCOLS, Remote};
use blockmux_engine::blocking::BlockingConnectError;
use blockmux_engine::socket::Address;
use blockmux_proto::iscsi::url::{HostPort, MAX_PORTALS, Portals};
use blockmux_volume::spec;
use std::fmt::Display;
use std::net::ToSocketAddrs;
use std::str::FromStr;
use std::time::Duration;

/// Reads the URL of a volume on another server.
pub(crate) fn of_url(url: &str) -> Result<Box<dyn Remote>, Failure> {
    let shown = spec::Url::new(url);
    let wrong = |what: String| Failure::request(format!("{shown}: {what}; {}", spoken()));
    let Some((scheme, _)) = url.split_once("://") else { return Err(wrong("is not a URL".to_owned())) };
    let scheme = scheme.to_ascii_lowercase();
    let found = PROTOCOLS.iter().find(|protocol| {
        let mut known = protocol.schemes.iter().map(|(known, _)| known).chain(protocol.unspoken_schemes);
        known.any(|known| *known == scheme)
    });
    match found {
        Some(protocol) => (protocol.remote)(url),
        None => Err(wrong(format!("no protocol is called `{scheme}`"))),
    }
}

/// Reads the URL of one protocol.
pub(crate) fn read<U: FromStr<Err: Display>>(url: &str) -> Result<U, Failure> {
    let shown = spec::Url::new(url);
    url.parse().map_err(|error| Failure::request(format!("{shown}: {error}")))
}

/// All addresses of a portal, its name looked up.
pub(crate) fn addresses(url: impl Display, (host, port): &HostPort) -> Result<Vec<Address>, Failure> {
    let found = (host.as_str(), *port)
        .to_socket_addrs()
        .map_err(|_| Failure::request(format!("{url}: cannot find host `{host}`; check its name")))?;
    Ok(found.map(Address::Tcp).collect())
}

/// The paths beside the first portal: of each by the first address that its name has, and those
/// that were `found`, as many as may be.
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

/// The other paths beside the one by `address`, as many as may be.
pub(crate) fn beside(address: &Address, further: &[Address]) -> Vec<Address> {
    let others = further.iter().filter(|other| *other != address).take(MAX_PORTALS.saturating_sub(1));
    others.cloned().collect()
}

/// A URL that names a server alone, where a volume is to be used; `path` is what volumes have
/// there.
pub(crate) fn names_no(what: &str, url: impl Display, path: &str) -> Failure {
    let url = url.to_string();
    let (place, query) = url.split_at(url.find('?').unwrap_or(url.len()));
    Failure::request(format!(
        "{url}: names no {what}; write {place}/{path}{query}, as `blockmux discover {url}` lists them"
    ))
}

/// How long an answer may take, where a URL says 0 for ever.
pub(crate) fn timeout(time: Duration) -> Option<Duration> {
    (!time.is_zero()).then_some(time)
}

/// Asks every address of a server in turn, until one gives an answer, even if that is no; the last
/// error when all are out of reach.
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

/// What to write instead.
fn spoken() -> String {
    let forms: Vec<&str> = PROTOCOLS.iter().flat_map(|protocol| protocol.url_forms).copied().collect();
    format!("use {}", forms.join(" or "))
}
