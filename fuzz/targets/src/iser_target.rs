//! A hostile initiator against the iSER target.
//!
//! Bits of a record's kind: 1, set a valid CmdSN; 2, name memory for both directions; 4, append as
//! much data as the PDU's length says.

use crate::choices::Choices;
use crate::iscsi_target::{exports, node};
use crate::rdma_target_side::{RdmaProtocolChecks, RdmaRun};
use blockmux_proto::iscsi::server::{IscsiTargetSession, IserTargetSession};
use blockmux_volume::{Pool, SgList};
use blockmux_wire::iscsi::Bhs;
use blockmux_wire::iscsi::session::NopIn;
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, transmute_ref};

/// Reads `data` as choices and messages.
pub(crate) fn iser_target(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let exports = exports();
    let pool = Pool::new(choices.of(&[usize::MAX, 64 << 10, 128 << 10, 1 << 20]));
    let now = Instant::now();
    let session = IscsiTargetSession::new(node(&exports), 1, pool.clone(), [0; 32], now);
    let session = IserTargetSession::new(session);
    let private_data = vec![choices.byte(); choices.below(8)];
    let checks = Iser { exp_cmd_sn: 1 };
    RdmaRun::drive((choices, &stream), (session, exports), checks, private_data, (pool, now));
}

struct Iser {
    /// The last ExpCmdSN of the target.
    exp_cmd_sn: u32,
}

impl RdmaProtocolChecks for Iser {
    /// Shorter than the deadlines of a login and of a ping.
    const NEAR: Duration = Duration::from_secs(10);
    /// The initial receive buffers, plus those for unsolicited data.
    const MAX_RECEIVES: u64 = 560 + 31 * 256;
    const MAX_POOLED: usize = 256 << 20;

    fn message(&mut self, kind: u8, mut message: Vec<u8>) -> Vec<u8> {
        if message.len() >= HEADERS {
            if kind & 1 != 0 {
                message[28 + 24..28 + 28].copy_from_slice(&self.exp_cmd_sn.to_be_bytes());
            }
            if kind & 2 != 0 {
                message[0] = 0x1c;
            }
            if kind & 4 != 0 {
                let len = u32::from_be_bytes([0, message[33], message[34], message[35]]) as usize;
                message.resize(message.len() + len.min(MAX_DATA), 7);
            }
        }
        message
    }

    fn on_accept(&mut self, private_data: &[u8]) {
        assert_eq!(private_data.len(), 4);
    }

    fn on_send(&mut self, head: &[u8], payload: &SgList) {
        let (bhs, _) = Bhs::read_from_prefix(&head[28..]).expect("messages are PDUs");
        let len = bhs.data_segment_length.get() as usize;
        assert!(head.len() + payload.len() >= HEADERS + len && head[0] == 0x10);
        let common: &NopIn = transmute_ref!(&bhs);
        self.exp_cmd_sn = common.exp_cmd_sn.get();
    }
}

/// Length of the iSER and iSCSI headers, in bytes.
const HEADERS: usize = 28 + 48;
/// Maximum data of one message, in bytes.
const MAX_DATA: usize = 8192;
