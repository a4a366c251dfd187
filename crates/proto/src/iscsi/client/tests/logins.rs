//! Login and bring-up, response by response.

use super::script::*;
use crate::driver::session::{Initiator, StreamSession, Timed};
use crate::iscsi::client::{IscsiRefused, SessionPurpose, UnitRefused, default_proposal};
use crate::iscsi::login::chap::{ChapAlgorithm, ChapChallenge, ChapCredentials, ChapSecret};
use crate::iscsi::node::Chap;
use crate::iscsi::text;
use crate::scsi::{Lun, ScsiStatus, Sense};
use blockmux_volume::{IoError, VolumeInfo};
use blockmux_wire::iscsi::IscsiOpcode;
use blockmux_wire::iscsi::session::*;
use blockmux_wire::scsi::sense::Asc;
use std::time::Duration;
use std::time::Instant;

fn credentials(name: &str, secret: &str) -> ChapCredentials {
    ChapCredentials::new(name, ChapSecret::new(secret.as_bytes()).unwrap()).unwrap()
}

fn chap(target: Option<&str>) -> Chap {
    Chap {
        initiator: credentials("user", "initiator-secret"),
        target: target.map(|secret| credentials("target", secret)),
        algorithms: ChapAlgorithm::ALL.to_vec(),
    }
}

fn value(pdu: &InitiatorPdu, key: &str) -> Option<String> {
    let pairs = text::pairs(&pdu.data).map(Result::unwrap);
    pairs.filter(|pair| pair.key == key).map(|pair| pair.value.to_owned()).next()
}

fn one(client: &mut ScriptedClient) -> InitiatorPdu {
    let [pdu] = client.sent().try_into().unwrap();
    pdu
}

#[test]
fn the_first_request_identifies_initiator_and_target() {
    let mut client = ScriptedClient::new(config(default_proposal()));
    let request = one(&mut client);
    let login: IscsiLoginRequest = request.as_a();
    assert_eq!((login.opcode, login.flags, login.isid), (0x43, 0x81, [0x80, 1, 2, 3, 0, 0]));
    let text =
        format!("InitiatorName={INITIATOR}\0TargetName={TARGET}\0SessionType=Normal\0AuthMethod=None\0");
    assert_eq!(request.data, text.as_bytes());
    client.login_response(0x81, LoginStatus::SUCCESS, b"TargetPortalGroupTag=1\0").unwrap();
    let request = one(&mut client);
    assert_eq!(request.as_a::<IscsiLoginRequest>().exp_stat_sn.get(), 2);
    assert_eq!(value(&request, "InitialR2T").as_deref(), Some("No"));
    assert_eq!(value(&request, "HeaderDigest").as_deref(), Some("None"));
}

#[test]
fn a_login_may_take_several_responses() {
    let mut client = ScriptedClient::new(config(default_proposal()));
    one(&mut client);
    // A text in two parts, without transit yet.
    client.login_response(0x40, LoginStatus::SUCCESS, b"AuthMethod=No").unwrap();
    assert_eq!((one(&mut client).bhs.flags, client.session.is_over()), (0, false));
    client.login_response(0x00, LoginStatus::SUCCESS, b"ne\0").unwrap();
    assert_eq!(one(&mut client).bhs.flags, 0x81);
    client.login_response(0x81, LoginStatus::SUCCESS, b"").unwrap();
    assert_eq!(one(&mut client).bhs.flags, 0x87);
    client.login_response(0x04, LoginStatus::SUCCESS, b"X-unknown=1\0").unwrap();
    let request = one(&mut client);
    assert_eq!((request.bhs.flags, value(&request, "X-unknown").as_deref()), (0x87, Some("NotUnderstood")));
    client.login_response(0x87, LoginStatus::SUCCESS, b"").unwrap();
    assert_eq!(one(&mut client).bhs.opcode(), IscsiOpcode::SCSI_COMMAND);
}

#[test]
fn a_login_that_does_not_end_fails() {
    let mut client = ScriptedClient::new(config(default_proposal()));
    let results = (0..100).map(|_| client.login_response(0x00, LoginStatus::SUCCESS, b""));
    let errors = results.filter_map(Result::err).collect::<Vec<_>>();
    assert_eq!(errors[0].what, "did not finish the login within 64 responses");
}

/// The target's side of CHAP, up to the initiator's response.
fn challenged(chap: Chap, algorithm: ChapAlgorithm) -> (ScriptedClient, InitiatorPdu) {
    let mut client = ScriptedClient::new(crate::iscsi::client::IscsiInitiatorConfig {
        chap: Some(chap),
        ..config(default_proposal())
    });
    let request = one(&mut client);
    assert_eq!(request.bhs.flags, 0);
    client.login_response(0x00, LoginStatus::SUCCESS, b"AuthMethod=CHAP\0").unwrap();
    assert_eq!(value(&one(&mut client), "CHAP_A").as_deref(), Some("8,7,6,5"));
    let text = format!("CHAP_A={}\0CHAP_I=9\0CHAP_C=0x0102030405060708\0", algorithm.number());
    client.login_response(0x00, LoginStatus::SUCCESS, text.as_bytes()).unwrap();
    let answer = one(&mut client);
    assert_eq!(answer.bhs.flags, 0x81);
    (client, answer)
}

#[test]
fn chap_authenticates_both_sides_with_every_algorithm() {
    for algorithm in ChapAlgorithm::ALL {
        let (mut client, answer) = challenged(chap(Some("target-secret")), algorithm);
        let challenge = ChapChallenge { identifier: 9, bytes: (1..=8).collect() };
        let response = text::parse_binary(&value(&answer, "CHAP_R").unwrap(), 64).unwrap();
        assert!(challenge.is_met(algorithm, &credentials("user", "initiator-secret"), "user", &response));
        let pending = text::parse_binary(&value(&answer, "CHAP_C").unwrap(), 64).unwrap();
        let identifier = value(&answer, "CHAP_I").unwrap().parse().unwrap();
        let proof = algorithm.response(identifier, &ChapSecret::new(b"target-secret").unwrap(), &pending);
        let mut text = text::TextBuilder::default();
        text.push("CHAP_N", "target");
        text.push_binary("CHAP_R", &proof);
        client.login_response(0x81, LoginStatus::SUCCESS, text.as_bytes()).unwrap();
        assert_eq!(one(&mut client).bhs.flags, 0x87, "{algorithm:?}");
    }
}

#[test]
fn a_target_that_fails_mutual_authentication_is_refused() {
    for proof in ["", "CHAP_N=target\0CHAP_R=0x00\0", "CHAP_N=other\0CHAP_R=0x00\0"] {
        let (mut client, _) = challenged(chap(Some("target-secret")), ChapAlgorithm::Md5);
        client.login_response(0x81, LoginStatus::SUCCESS, proof.as_bytes()).unwrap();
        assert_eq!(client.session.refused(), Some(&IscsiRefused::MutualAuthFailed));
        assert!(client.is_closing() && client.session.is_over() && client.sent().is_empty());
    }
    let config = crate::iscsi::client::IscsiInitiatorConfig {
        chap: Some(chap(Some("s"))),
        ..config(default_proposal())
    };
    let mut client = ScriptedClient::new(config);
    client.login_response(0x00, LoginStatus::SUCCESS, b"AuthMethod=None\0").unwrap();
    assert_eq!(client.session.refused(), Some(&IscsiRefused::MutualAuthFailed));
}

#[test]
fn a_chap_violation_ends_the_session() {
    let (client, answer) = challenged(chap(Some("target-secret")), ChapAlgorithm::Md5);
    drop(client);
    let reflected = format!("CHAP_A=5\0CHAP_I=1\0CHAP_C={}\0", value(&answer, "CHAP_C").unwrap());
    for wrong in
        [reflected.as_str(), "CHAP_A=4\0CHAP_I=1\0CHAP_C=0x01\0", "CHAP_A=5\0CHAP_I=256\0CHAP_C=0x01\0"]
    {
        let config = crate::iscsi::client::IscsiInitiatorConfig {
            chap: Some(chap(Some("target-secret"))),
            ..config(default_proposal())
        };
        let mut client = ScriptedClient::new(config);
        client.login_response(0x00, LoginStatus::SUCCESS, b"AuthMethod=CHAP\0").unwrap();
        assert!(client.login_response(0x00, LoginStatus::SUCCESS, wrong.as_bytes()).is_err(), "{wrong}");
    }
}

#[test]
fn refusals_and_redirections_differ_from_protocol_violations() {
    let cases = [
        (LoginStatus::NOT_FOUND, "", IscsiRefused::Login(LoginStatus::NOT_FOUND)),
        (
            LoginStatus::TARGET_MOVED_TEMPORARILY,
            "TargetAddress=192.0.2.9:3260,1\0",
            IscsiRefused::Moved { address: "192.0.2.9:3260,1".into(), permanent: false },
        ),
        (
            LoginStatus::TARGET_MOVED_PERMANENTLY,
            "",
            IscsiRefused::Login(LoginStatus::TARGET_MOVED_PERMANENTLY),
        ),
    ];
    for (status, text, expected) in cases {
        let mut client = ScriptedClient::new(config(default_proposal()));
        client.login_response(0x00, status, text.as_bytes()).unwrap();
        assert_eq!(client.session.refused(), Some(&expected));
        assert!(client.is_closing() && client.stream().on_end(Instant::now()).is_ok());
    }
    let mut client = ScriptedClient::new(config(default_proposal()));
    client.login_response(0x00, LoginStatus::SUCCESS, b"AuthMethod=KRB5\0").unwrap();
    assert_eq!(client.session.refused(), Some(&IscsiRefused::NoCommonAuthMethod));
}

#[test]
fn responses_that_no_login_allows_end_the_session() {
    let wrong = [(0x87, "§6.3"), (0x04, "§6.3"), (0xc1, "§6.3")];
    for (flags, _) in wrong {
        let mut client = ScriptedClient::new(config(default_proposal()));
        assert!(client.login_response(flags, LoginStatus::SUCCESS, b"").is_err(), "{flags:x}");
    }
    for text in [&b"nonsense\0"[..], b"unended"] {
        let mut client = ScriptedClient::new(config(default_proposal()));
        assert!(client.login_response(0x81, LoginStatus::SUCCESS, text).is_err());
    }
    for text in ["MaxBurstLength=99999999\0", "HeaderDigest=CRC32C\0", "InitialR2T=No\0InitialR2T=No\0"] {
        let mut client = ScriptedClient::new(config(default_proposal()));
        client.login_response(0x81, LoginStatus::SUCCESS, b"").unwrap();
        assert!(client.login_response(0x87, LoginStatus::SUCCESS, text.as_bytes()).is_err(), "{text}");
    }
    let mut client = ScriptedClient::new(config(default_proposal()));
    assert!(client.stream().on_end(Instant::now()).is_err());
    assert!(client.feed(&[&[0x20, 0x80][..], &[0; 46]].concat()).is_err(), "a NOP-In during the login");
}

#[test]
fn login_and_bring_up_have_30_seconds() {
    for mut client in [ScriptedClient::new(config(default_proposal())), ScriptedClient::logged_in("")] {
        let first = client.stream().poll_timeout().unwrap();
        assert!(client.stream().on_timeout(first - Duration::from_secs(31)).is_ok());
        assert!(client.stream().on_timeout(first + Duration::from_secs(31)).is_err());
    }
}

#[test]
fn everything_the_unit_reports_becomes_volume_properties() {
    at_every_split(|step| {
        let mut client = ScriptedClient::logged_in("");
        client.step = step;
        client.bring_up(&Unit { device_specific: 0x90, ..Unit::default() });
        let unit = client.session.unit().unwrap();
        assert_eq!(
            (unit.vendor.as_str(), unit.product.as_str(), unit.revision.as_str()),
            ("MAKER", "A DISK", "1.0")
        );
        assert_eq!((unit.serial.as_str(), unit.designator.as_str()), ("serial", "naa.6060606060606060"));
        assert_eq!(client.session.luns(), [Lun::new(0), Lun::new(1)]);
        let expected = VolumeInfo {
            read_only: true,
            write_cache: true,
            discard_granularity: 4096,
            fast_zeroes: true,
            lends_reads: true,
            ..VolumeInfo::new(512 << 20)
        };
        assert_eq!(client.session.unit().unwrap().volume_info(), expected);
    });
}

#[test]
fn an_old_unit_is_used_without_optional_features() {
    let mut client = ScriptedClient::logged_in("");
    client.bring_up(&Unit { is_long: false, is_thin: false, device_specific: 0, ..Unit::default() });
    let unit = client.session.unit().unwrap();
    assert!(!unit.long_commands && !unit.fua && unit.unmap.is_none());
    client.read(0, 512, 1024);
    assert_eq!(client.command().cdb()[..10], [0x28, 0, 0, 0, 0, 1, 0, 0, 2, 0]);
}

#[test]
fn unit_attentions_and_busy_units_are_waited_for() {
    let mut client = ScriptedClient::logged_in("");
    for attention in [Asc::POWER_ON_RESET_OR_BUS_DEVICE_RESET_OCCURRED, Asc::MODE_PARAMETERS_CHANGED] {
        let command = client.command();
        let sense = Sense::new(blockmux_wire::scsi::sense::SenseKey::UNIT_ATTENTION, attention);
        client.status(&command, ScsiStatus::CHECK_CONDITION, Some(sense));
    }
    let command = client.command();
    client.status(&command, ScsiStatus::BUSY, None);
    assert_eq!(client.sent().len(), 0);
    let deadline = client.stream().poll_timeout().unwrap();
    client.stream().on_timeout(deadline).unwrap();
    let command = client.command();
    client.status(&command, ScsiStatus::GOOD, None);
    client.bring_up(&Unit::default());
    assert!(client.session.is_ready());
}

#[test]
fn an_unusable_unit_is_reported_and_logged_out_of() {
    let missing = Sense::illegal(Asc::LOGICAL_UNIT_NOT_SUPPORTED);
    let mut client = ScriptedClient::logged_in("");
    // TEST UNIT READY, REPORT LUNS, INQUIRY.
    for answer in [None, Some([&8u32.to_be_bytes()[..], &[0; 4], &[0, 5, 0, 0, 0, 0, 0, 0]].concat()), None] {
        let command = client.command();
        match answer {
            Some(data) => client.data(&command, &data),
            None => client.status(&command, ScsiStatus::CHECK_CONDITION, Some(missing)),
        }
    }
    assert_eq!(client.session.refused(), Some(&IscsiRefused::Unit(UnitRefused::NoSuchUnit(Lun::new(0)))));
    assert_eq!(client.session.luns(), [Lun::new(5)]);
    assert_eq!(one(&mut client).bhs.opcode(), IscsiOpcode::LOGOUT_REQUEST);
    assert_eq!(client.session.room(), 0);
    let mut client = ScriptedClient::logged_in("");
    client.bring_up(&Unit { block_len: 520, ..Unit::default() });
    let said = client.session.refused().unwrap().to_string();
    assert_eq!(said, "logical unit 0 has 1048576 blocks of 520 bytes, which is not supported");
}

#[test]
fn a_describe_session_logs_out() {
    let mut client = ScriptedClient::new(crate::iscsi::client::IscsiInitiatorConfig {
        purpose: SessionPurpose::Describe,
        ..config(default_proposal())
    });
    client.sent();
    for flags in [0x81, 0x87] {
        client.login_response(flags, LoginStatus::SUCCESS, b"").unwrap();
        if flags == 0x81 {
            client.sent();
        }
    }
    client.bring_up(&Unit::default());
    assert!(client.session.unit().is_some() && !client.session.is_ready() && client.session.room() == 0);
    let response = LogoutResponse {
        opcode: IscsiOpcode::LOGOUT_RESPONSE.0,
        initiator_task_tag: 0xffff_fffd.into(),
        ..zerocopy::FromZeros::new_zeroed()
    };
    client.send(&response, &[]).unwrap();
    assert!(client.is_closing() && client.session.is_over());
    client.session.submit(blockmux_volume::Io::new(
        blockmux_volume::Tag(1),
        blockmux_volume::Op::Flush,
        0,
        0,
    ));
    assert_eq!(client.done_error(), IoError::ShuttingDown);
}
