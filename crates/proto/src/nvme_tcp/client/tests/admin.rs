//! Initialization of a controller.

use super::script::*;
use crate::driver::session::Control;
use crate::nvme_tcp::client::*;
use crate::testing::Driver;
use blockmux_volume::Pool;
use std::time::{Duration, Instant};

fn admin(
    query: ControllerQuery,
    format: WireFormat,
    step: usize,
    now: Instant,
) -> Driver<NvmeTcpAdminSession> {
    let config = AdminConfig {
        names: names(),
        credentials: None,
        queues: 1,
        query,
        keep_alive: Duration::from_secs(5),
    };
    Driver::of(NvmeTcpAdminSession::new(config, format.digests, Pool::new(1 << 20), now), step)
}

#[test]
fn a_namespace_is_learned_however_bytes_are_cut() {
    for format in [PLAIN, BOTH] {
        at_every_split(|step| {
            let mut driver = admin(ControllerQuery::Use(1), format, step, Instant::now());
            let opcodes = bring_up(&mut driver, format, &mut ScriptedSubsystem::default());
            // Connect, CAP, VS, CC, CSTS; controller, limits, namespace, descriptors; number of
            // queues.
            assert_eq!(opcodes, [0x7f, 0x7f, 0x7f, 0x7f, 0x7f, 6, 6, 6, 6, 9]);
            assert!(driver.session.is_ready() && !driver.is_closing());
            let controller = driver.session.controller().unwrap();
            assert_eq!((controller.cntlid, controller.max_entries, controller.in_capsule), (5, 128, 8192));
            let [namespace] = driver.session.namespaces() else { panic!() };
            let info = namespace.volume_info();
            assert_eq!((info.size, info.logical_block, info.physical_block), (4_096_000, 4096, 16384));
            assert!(info.write_cache && info.fast_zeroes && !info.read_only);
            assert_eq!((namespace.max_transfer, namespace.max_zeroes_blocks), (128 << 10, Some(32)));
            assert_eq!(namespace.identity, "uuid.5a5a5a5a-5a5a-5a5a-5a5a-5a5a5a5a5a5a");
        });
    }
}
