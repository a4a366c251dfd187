//! This process as a client of a cluster, and how the cluster fences clients.
//!
//! Each connection is a client of its own, which the cluster knows by an address with a number that
//! no other connection has. A client that the cluster has blocklisted is refused by every storage
//! daemon that has the map of the cluster with that entry, and by every one that is shown a request
//! of a client which has that map: so the one that fences waits for the map before it goes on.
//!
//! The calls here block for as long as the monitors do not answer, so cores do not make them.
#![expect(unsafe_code, reason = "calls a library in C")]

use crate::cluster::{Cluster, FENCED_FOR, c_string};
use crate::error::{Errno, RbdError};
use std::ffi::CStr;
use std::net::SocketAddr;

impl Cluster {
    /// The address of this client, such as `192.0.2.7:0/3141592653`, as [`Cluster::fence`] takes it
    /// and as locks of images name their owners.
    ///
    /// # Errors
    /// If librados does not tell it.
    pub fn client_address(&self) -> Result<String, RbdError> {
        let mut addresses = std::ptr::null_mut();
        // SAFETY: the cluster is connected, and there is a place for a text.
        let told = unsafe { (self.library.rados.rados_getaddrs)(self.handle, &raw mut addresses) };
        RbdError::check("rados_getaddrs", told)?;
        // SAFETY: librados has filled it with a text that it has allocated.
        let text = unsafe { CStr::from_ptr(addresses) }.to_string_lossy().into_owned();
        // SAFETY: it was allocated by `strdup`, and is not used again.
        unsafe { libc::free(addresses.cast()) };
        let unknown = RbdError::Call { call: "rados_getaddrs", error: Errno(libc::EBADMSG) };
        first_address(&text).ok_or(unknown)
    }

    /// Has the cluster refuse whatever the client at this address sends, for [`FENCED_FOR`], and
    /// waits until this client has the map that says so.
    ///
    /// # Errors
    /// If it is not the address of one client (`EINVAL`), or the cluster refuses that.
    pub fn fence(&self, client: &str) -> Result<(), RbdError> {
        if !is_client(client) {
            return Err(RbdError::Call { call: "rados_blocklist_add", error: Errno(libc::EINVAL) });
        }
        let client = c_string("the client's address", client)?;
        let seconds = u32::try_from(FENCED_FOR.as_secs()).unwrap_or(u32::MAX);
        // SAFETY: the cluster is connected; a text, which librados only reads.
        let added = unsafe {
            (self.library.rados.rados_blocklist_add)(self.handle, client.as_ptr().cast_mut(), seconds)
        };
        RbdError::check("rados_blocklist_add", added)?;
        self.wait_for_latest_map()
    }

    /// Waits until this client has the newest map of the cluster. Storage daemons then know all
    /// fences before it, as soon as they are shown a request of this client.
    ///
    /// # Errors
    /// If the monitors do not tell it.
    pub fn wait_for_latest_map(&self) -> Result<(), RbdError> {
        // SAFETY: the cluster is connected.
        let waited = unsafe { (self.library.rados.rados_wait_for_latest_osdmap)(self.handle) };
        RbdError::check("rados_wait_for_latest_osdmap", waited).map(drop)
    }
}

/// The first of the addresses that librados tells, such as `[v2:192.0.2.7:0/1,v1:192.0.2.7:0/1]`,
/// without its kind: the cluster fences all kinds of it.
fn first_address(addresses: &str) -> Option<String> {
    let first = addresses.trim_start_matches("[v").split(',').next()?.trim_end_matches(']');
    let address = match first.split_once(':') {
        Some((kind, address)) if kind.len() <= MAX_KIND && !kind.contains(['.', '[']) => address,
        _ => first,
    };
    is_client(address).then(|| address.to_owned())
}

/// Whether this is the address of one client, such as `192.0.2.7:0/3141592653`. The cluster takes
/// the number 0 for all clients of a host, and cuts larger ones to 32 bits.
fn is_client(address: &str) -> bool {
    let Some((place, number)) = address.rsplit_once('/') else { return false };
    let is_number = !number.starts_with('+') && number.parse::<u32>().is_ok_and(|number| number > 0);
    is_number && place.parse::<SocketAddr>().is_ok()
}

/// The longest word for a kind of address: "any".
const MAX_KIND: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_cluster::FakeCluster;

    #[test]
    fn only_one_client_is_fenced_never_a_host() {
        let fake = FakeCluster::default();
        let (cluster, other) = (fake.connect(), fake.connect());
        for bad in [
            "192.0.2.1:0/0",
            "192.0.2.1:0/00",
            "192.0.2.1:0/4294967296",
            "192.0.2.1:0/+2",
            "192.0.2.1:0",
            "192.0.2.1/2",
            "192.0.2.0/24",
            "host:0/2",
            "v1:192.0.2.1:0/2",
            "",
        ] {
            let refused = cluster.fence(bad);
            let is_refused = matches!(refused, Err(RbdError::Call { error: Errno(libc::EINVAL), .. }));
            assert!(is_refused, "{bad}: {refused:?}");
        }
        cluster.fence(&other.client_address().unwrap()).unwrap();
        cluster.fence("[2001:db8::7]:0/4294967295").unwrap();
    }

    #[test]
    fn the_address_of_a_client_is_read_as_locks_name_it() {
        for (told, expected) in [
            ("192.0.2.7:0/31", "192.0.2.7:0/31"),
            ("v2:192.0.2.7:0/31", "192.0.2.7:0/31"),
            ("any:192.0.2.7:0/31", "192.0.2.7:0/31"),
            ("[v2:192.0.2.7:0/31,v1:192.0.2.7:0/31]", "192.0.2.7:0/31"),
            ("v2:[2001:db8::7]:0/31", "[2001:db8::7]:0/31"),
            ("[v2:[2001:db8::7]:0/31,v1:[2001:db8::7]:0/31]", "[2001:db8::7]:0/31"),
            ("[2001:db8::7]:0/31", "[2001:db8::7]:0/31"),
        ] {
            assert_eq!(first_address(told).as_deref(), Some(expected), "{told}");
        }
        for bad in ["", "-", ":/0", "v2:", "192.0.2.7:0", "192.0.2.7:0/x", "[]"] {
            assert_eq!(first_address(bad), None, "{bad}");
        }
    }
}
