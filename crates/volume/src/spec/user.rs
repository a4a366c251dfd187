//! The user of a URL.

/// Splits `[user[%password]@]portals/path` of an iSCSI URL into the part before the `@` and the
/// rest. The `@` of a path does not end a user, but a password may contain slashes, as in libiscsi.
#[must_use]
pub fn split_user(place: &str) -> (Option<&str>, &str) {
    let authority = place.split('/').next().unwrap_or(place);
    let is_cut = !authority.contains('@') && !authority.split(',').all(may_be_portal);
    let ending = if is_cut { place } else { authority };
    match ending.rsplit_once('@') {
        Some((user, _)) => (Some(user), place.get(user.len() + 1..).unwrap_or_default()),
        None => (None, place),
    }
}

/// Whether the text looks like `host`, `host:port` or `[address]:port`.
fn may_be_portal(text: &str) -> bool {
    let is_port = |port: &str| port.bytes().all(|byte| byte.is_ascii_digit());
    let is_end = |rest: &str| rest.strip_prefix(':').map_or(rest.is_empty(), is_port);
    match text.strip_prefix('[') {
        Some(address) => address.split_once(']').is_some_and(|(_, rest)| is_end(rest)),
        None => !text.contains('%') && text.split_once(':').is_none_or(|(_, port)| is_port(port)),
    }
}
