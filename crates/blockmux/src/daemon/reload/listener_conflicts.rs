//! Finds listeners that cannot be bound or changed because of those that run.

use super::{RunningConfig, key_of};
use crate::protocol::address::ListenerAddress;
use crate::protocol::policy::PolicyListener;
use std::collections::HashMap;

/// The listeners of a new config, at these places, that are refused because of those that run, each
/// with the reason and what to do.
pub(super) fn find(
    config: &RunningConfig,
    places: Vec<(ListenerAddress, PolicyListener)>,
) -> Vec<(PolicyListener, String)> {
    let known: HashMap<_, _> = config.listeners.iter().map(|(_, own)| (key_of(own), own)).collect();
    let mut at_port: HashMap<u16, Vec<&PolicyListener>> = HashMap::new();
    for (_, own) in &config.listeners {
        own.place.tcp().into_iter().for_each(|tcp| at_port.entry(tcp.port()).or_default().push(own));
    }
    let conflict = |(_, new): (ListenerAddress, PolicyListener)| {
        let why = match known.get(&key_of(&new)) {
            Some(own) => fixed_fabric(config, own, &new)?,
            None => excluded(at_port.get(&new.place.tcp()?.port())?, &new)?,
        };
        Some((new, why))
    };
    places.into_iter().filter_map(conflict).collect()
}

/// Why a new listener cannot be bound while one of those that run at its port is.
fn excluded(at_port: &[&PolicyListener], new: &PolicyListener) -> Option<String> {
    let own = at_port.iter().find(|own| own.place.excludes(&new.place))?;
    Some(format!(
        "cannot listen on {} while this daemon listens on {}, for {}; remove that listener, reload, then add this one",
        new.place, own.place, own.protocol.title
    ))
}

/// Why a listener keeps its fabric: without it, nothing would listen at its TCP port.
fn fixed_fabric(config: &RunningConfig, own: &PolicyListener, new: &PolicyListener) -> Option<String> {
    let is_fixed = own.fabric != new.fabric && config.without_tcp.contains(&own.place);
    is_fixed.then(|| {
        format!(
            "{}: an RDMA device has this TCP port, and a running daemon cannot change its rdma=; restart the daemon, \
             or remove the listener, reload, then add it again",
            own.place
        )
    })
}
