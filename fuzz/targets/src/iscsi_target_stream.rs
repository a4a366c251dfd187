//! Checks the stream of an iSCSI target: complete PDUs of a target, numbered as in RFC 7143 §4.2.2.

use crate::target_side::{ProtocolChecks, Sent};
use blockmux_wire::iscsi::scsi::ScsiResponse;
use blockmux_wire::iscsi::session::{FLAG_TRANSIT, Stage, next_stage};
use blockmux_wire::iscsi::{BHS_LEN, Bhs, DIGEST_LEN, IscsiOpcode, RESERVED_TAG, padding};
use blockmux_wire::scsi::status::ScsiStatus;
use std::time::Duration;
use zerocopy::{FromBytes, transmute_ref};

/// The stream of a target so far.
#[derive(Default)]
pub(crate) struct TargetStream {
    rest: Vec<u8>,
    /// Whether HeaderDigest was negotiated; it applies after the login.
    header_digest: bool,
    data_digest: bool,
    is_logged_in: bool,
    /// Whether ErrorRecoveryLevel is not 0, so that PDUs may be retransmitted.
    recovers: bool,
    /// The next StatSN, once one was seen.
    stat_sn: Option<u32>,
    /// The last MaxCmdSN after the login.
    max_cmd_sn: Option<u32>,
}

impl ProtocolChecks for TargetStream {
    /// Shorter than the deadlines of a login and of a ping.
    const NEAR: Duration = Duration::from_secs(10);
    const MAX_OUTBOX: usize = (64 << 20) + (32 << 20) + (2 << 20);
    const MAX_POOLED: usize = 256 << 20;

    fn on_sent(&mut self, sent: &Sent<'_>) {
        self.rest.extend(sent.bytes);
        while let Some(len) = self.first_pdu() {
            self.rest.drain(..len);
        }
    }

    fn on_quiet(&self) {
        assert!(self.rest.is_empty(), "only {} bytes of a PDU were sent", self.rest.len());
    }
}

impl TargetStream {
    /// Checks the first PDU if it is complete; returns its length.
    fn first_pdu(&mut self) -> Option<usize> {
        let bhs = Bhs::read_from_bytes(self.rest.get(..BHS_LEN)?).ok()?;
        let data_len = bhs.data_segment_length.get() as usize;
        let header_len = BHS_LEN + if self.is_logged_in && self.header_digest { DIGEST_LEN } else { 0 };
        let digest_len = if self.is_logged_in && self.data_digest && data_len > 0 { DIGEST_LEN } else { 0 };
        let len = header_len + data_len + padding(data_len) + digest_len;
        let data = self.rest.get(..len)?[header_len..header_len + data_len].to_vec();
        self.check(&bhs, &data);
        Some(len)
    }

    fn check(&mut self, bhs: &Bhs, data: &[u8]) {
        let opcode = bhs.opcode();
        assert!(opcode.name().is_some() && opcode.0 & 0x20 != 0, "a target must not send {opcode}");
        assert_eq!(bhs.total_ahs_length, 0);
        assert_eq!(
            opcode == IscsiOpcode::LOGIN_RESPONSE,
            !self.is_logged_in,
            "{opcode} was sent in the wrong phase"
        );
        let number = |at: usize| {
            let bytes = &bhs.specific_end[at..at + 4];
            u32::from_be_bytes(bytes.try_into().expect("there are four bytes"))
        };
        let (stat_sn, exp_cmd_sn, max_cmd_sn) = (number(4), number(8), number(12));
        let has_status = match opcode {
            IscsiOpcode::DATA_IN => bhs.flags & 1 != 0,
            IscsiOpcode::R2T => false,
            IscsiOpcode::NOP_IN => bhs.initiator_task_tag.get() != RESERVED_TAG,
            _ => true,
        };
        if has_status {
            let expected = self.stat_sn.unwrap_or(stat_sn);
            let is_again = self.recovers && (1..1 << 16).contains(&expected.wrapping_sub(stat_sn));
            if !is_again {
                assert_eq!(stat_sn, expected, "StatSN of {opcode}");
                self.stat_sn = Some(expected.wrapping_add(1));
            }
        }
        if opcode == IscsiOpcode::SCSI_RESPONSE {
            check_status(bhs, data);
        }
        if opcode == IscsiOpcode::LOGIN_RESPONSE {
            self.on_login(bhs, data);
        } else {
            let last = self.max_cmd_sn.replace(max_cmd_sn).unwrap_or(max_cmd_sn);
            assert!(max_cmd_sn.wrapping_sub(last) < 1 << 16, "MaxCmdSN has decreased");
            assert!(max_cmd_sn.wrapping_add(1).wrapping_sub(exp_cmd_sn) <= 256, "the window is too large");
        }
    }

    fn on_login(&mut self, bhs: &Bhs, data: &[u8]) {
        for pair in data.split(|&byte| byte == 0) {
            self.header_digest |= pair == b"HeaderDigest=CRC32C";
            self.data_digest |= pair == b"DataDigest=CRC32C";
            self.recovers |= pair == b"ErrorRecoveryLevel=1" || pair == b"ErrorRecoveryLevel=2";
        }
        let ends = bhs.flags & FLAG_TRANSIT != 0 && next_stage(bhs.flags) == Stage::FULL_FEATURE_PHASE;
        self.is_logged_in = ends && bhs.specific_end[16] == 0;
    }
}

/// Checks that the status is one of SAM-5's, and that sense data comes only with CHECK CONDITION
/// and has the length in its header (SPC-5, both formats).
fn check_status(bhs: &Bhs, data: &[u8]) {
    let response: &ScsiResponse = transmute_ref!(bhs);
    let status = ScsiStatus(response.status);
    assert!(status.name().is_some(), "{status} is not a status of SAM-5");
    assert_eq!(status == ScsiStatus::CHECK_CONDITION, !data.is_empty(), "{status} and its sense data");
    let Some((len, sense)) = data.split_first_chunk() else { return };
    assert_eq!(usize::from(u16::from_be_bytes(*len)), sense.len(), "SenseLength");
    assert!(matches!(sense[0] & 0x7f, 0x70 | 0x72), "response code {:#x}", sense[0]);
    assert_eq!(usize::from(sense[7]) + 8, sense.len(), "ADDITIONAL SENSE LENGTH");
}
