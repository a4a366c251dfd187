//! iSCSI over real sockets: serving targets.
//!
//! Reaching one belongs here, too, beside [`serve`]: `connect`, `describe` and `list`, as NBD has them.

mod background;

use crate::listener::Serve;
use crate::sys;
use crate::target::TargetTask;
use background::Background;
use blockmux_proto::exports::Exports;
use blockmux_proto::iscsi::node::Node;
use blockmux_proto::iscsi::sessions::MAX_LOGINS;
use blockmux_proto::iscsi::target::TargetSession;
use blockmux_volume::Core;
use std::net::IpAddr;
use std::sync::Arc;
use tracing::warn;

/// Serves the node's targets to each connection that is accepted by a portal of the group `group_tag`. Their logical
/// units lead to places in `exports`.
#[must_use]
pub fn serve(node: &Arc<Node>, exports: &Exports, group_tag: u16) -> Serve {
    let (node, exports) = (node.clone(), exports.clone());
    let background = Background::new(&node, &exports);
    Arc::new(move |core, stream, permit| {
        background.begin_on(core);
        let Some(login) = node.begin_login() else {
            warn!(peer = stream.peer(), "refused: {MAX_LOGINS} logins are under way already");
            return;
        };
        let seed = match sys::random_bytes() {
            Ok(seed) => seed,
            Err(error) => {
                warn!(peer = stream.peer(), "refused: no random numbers for its login: {error}");
                return;
            }
        };
        let local_ip = stream.local_ip().map(in_brackets).unwrap_or_default();
        let hang_up = Arc::new(stream.hang_up());
        let session = TargetSession::new(node.clone(), group_tag, core.pool().clone(), seed, core.now())
            .admitted(login, local_ip, hang_up);
        TargetTask::spawn(core, stream, session, exports.clone(), permit);
    })
}

/// As it stands before a colon and a port.
fn in_brackets(ip: IpAddr) -> String {
    match ip {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    }
}
