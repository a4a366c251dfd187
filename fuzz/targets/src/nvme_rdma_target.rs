//! A hostile host against the NVMe/RDMA target.
//!
//! Bits of the first choice: 1, another connection has created controller 1, so that messages may
//! connect an I/O queue; 2, the first record is the private data of the connection. Bits of a
//! record's kind: 1, use a free CID.

use crate::choices::Choices;
use crate::nvme_tcp_target::{admin, exports, node};
use crate::rdma_target_side::{RdmaProtocolChecks, RdmaRun};
use crate::records::Records;
use blockmux_proto::nvme_rdma::server::NvmeRdmaTargetSession;
use blockmux_volume::{Pool, SgList};
use blockmux_wire::nvme::{CQE_LEN, Cqe};
use blockmux_wire::nvmeof::rdma::{CmAccept, CmRequest};
use std::time::{Duration, Instant};
use zerocopy::{FromBytes, IntoBytes};

/// Reads `data` as choices and messages.
pub(crate) fn nvme_rdma_target(data: &[u8]) {
    let (mut choices, stream) = Choices::split(data);
    let exports = exports();
    let pool = Pool::new(choices.of(&[usize::MAX, 64 << 10, 128 << 10, 4 << 20]));
    let now = Instant::now();
    let node = node(&exports);
    let first = choices.byte();
    let is_io_queue = first & 1 != 0;
    let _admin = is_io_queue.then(|| admin(&node, &pool, now));
    let mut messages = Records(&stream);
    let private_data = if first & 2 != 0 {
        messages.kind();
        messages.bytes()
    } else {
        let request = CmRequest {
            qid: u16::from(is_io_queue).into(),
            hrqsize: 32.into(),
            hsqsize: 31.into(),
            ..CmRequest::default()
        };
        request.as_bytes().to_vec()
    };
    let session = NvmeRdmaTargetSession::new(node, pool.clone(), now);
    let checks = NvmeRdma { cid: 0, unanswered: 0 };
    RdmaRun::drive((choices, messages.0), (session, exports), checks, private_data, (pool, now));
}

struct NvmeRdma {
    /// Identifier of the next command.
    cid: u16,
    /// Number of messages without a completion.
    unanswered: u32,
}

impl RdmaProtocolChecks for NvmeRdma {
    /// Shorter than the deadline of connecting.
    const NEAR: Duration = Duration::from_millis(100);
    const MAX_RECEIVES: u64 = 1 << 16;
    const MAX_POOLED: usize = 256 << 20;

    fn message(&mut self, kind: u8, mut message: Vec<u8>) -> Vec<u8> {
        self.unanswered += 1;
        if message.len() >= 4 && kind & 1 != 0 {
            self.cid = self.cid.wrapping_add(1);
            message[2..4].copy_from_slice(&self.cid.to_le_bytes());
        }
        message
    }

    fn on_accept(&mut self, private_data: &[u8]) {
        let accept = CmAccept::read_from_bytes(private_data).expect("32 bytes");
        assert!(accept.recfmt.get() == 0 && accept.crqsize.get() > 0);
    }

    /// Checks that it is a completion, and that there are no more completions than commands.
    fn on_send(&mut self, head: &[u8], payload: &SgList) {
        assert_eq!((head.len(), payload.len()), (CQE_LEN, 0));
        Cqe::read_from_bytes(head).expect("a completion");
        self.unanswered = self.unanswered.checked_sub(1).expect("a completion for each command");
    }
}
