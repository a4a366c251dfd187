//! Discovery sessions, response by response.

use super::script::{INITIATOR, InitiatorPdu, pdus};
use crate::driver::session::ProtocolError;
use crate::iscsi::client::IscsiDiscoverySession;
use crate::iscsi::name::Name;
use crate::testing::Driver;
use blockmux_wire::iscsi::session::{IscsiLoginResponse, LoginStatus};
use blockmux_wire::iscsi::{IscsiOpcode, U24, padding};
use std::time::Instant;
use zerocopy::{FromZeros, IntoBytes};

/// A discovery session and its scripted target.
struct ScriptedDiscovery {
    driver: Driver<IscsiDiscoverySession>,
    stat_sn: u32,
}

impl ScriptedDiscovery {
    fn new() -> ScriptedDiscovery {
        let name = Name::new(INITIATOR).unwrap();
        let session = IscsiDiscoverySession::new(name, None, [0x80, 0, 0, 0, 0, 3], [5; 32], Instant::now());
        ScriptedDiscovery { driver: Driver::of(session, usize::MAX), stat_sn: 0 }
    }

    fn sent(&mut self) -> InitiatorPdu {
        let [pdu] = pdus(&self.driver.sent(), false).try_into().unwrap();
        pdu
    }

    fn login_response(&mut self, flags: u8, text: &[u8]) -> Result<(), ProtocolError> {
        self.stat_sn += 1;
        let response = IscsiLoginResponse {
            opcode: IscsiOpcode::LOGIN_RESPONSE.0,
            flags,
            data_segment_length: U24::new(text.len() as u32),
            tsih: 7.into(),
            initiator_task_tag: 1.into(),
            stat_sn: self.stat_sn.into(),
            exp_cmd_sn: 1.into(),
            max_cmd_sn: 1.into(),
            status: LoginStatus::SUCCESS.0.into(),
            ..IscsiLoginResponse::new_zeroed()
        };
        self.driver.feed(&[response.as_bytes(), text, &[0; 3][..padding(text.len())]].concat())
    }
}

#[test]
fn a_target_that_keeps_no_sessions_is_asked_for_its_targets() {
    let mut discovery = ScriptedDiscovery::new();
    discovery.sent();
    discovery.login_response(0x81, b"AuthMethod=None\0").unwrap();
    discovery.sent();
    // The answers of SCST 3.11, whatever was proposed: it has no other value of these three keys.
    let answers = b"HeaderDigest=None\0DataDigest=None\0MaxRecvDataSegmentLength=1048576\0\
                    DefaultTime2Wait=0\0DefaultTime2Retain=0\0ErrorRecoveryLevel=0\0";
    discovery.login_response(0x87, answers).unwrap();
    let request = discovery.sent();
    assert_eq!(
        (request.bhs.opcode(), &*request.data),
        (IscsiOpcode::TEXT_REQUEST, &b"SendTargets=All\0"[..])
    );
}
