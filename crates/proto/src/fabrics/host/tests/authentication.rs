//! DH-HMAC-CHAP with controllers that return less data than the host asked for.

use super::*;
use crate::driver::session::Initiator;
use crate::nvme::auth::controller::Authenticator;
use crate::nvme::auth::controller::tests::secrets;
use crate::nvme::auth::{AuthFailure, Concatenation, DhGroup, Hash, HostSecrets, MAX_MESSAGE};
use blockmux_wire::nvmeof::auth::Explanation;
use blockmux_wire::nvmeof::fabrics::{AUTHREQ_ATR, FabricsType, fabrics_type};
use data_encoding::HEXLOWER;
use std::sync::Arc;
use std::time::Duration;

fn credentials(secrets: HostSecrets) -> Option<HostCredentials> {
    let concatenation = Concatenation::None;
    Some(HostCredentials { secrets: Arc::new(secrets), seed: [9; 32], concatenation })
}

fn admin(secrets: HostSecrets) -> Driver<AdminSession> {
    let config = AdminConfig {
        names: names(),
        credentials: credentials(secrets),
        queues: 1,
        query: ControllerQuery::Use(1),
        keep_alive: Duration::ZERO,
    };
    let mut driver =
        Driver::of(AdminSession::new(config, (), Pool::new(1 << 20), Instant::now()), usize::MAX);
    driver.session.receive(driver.session.admin.now(), |_, _| Ok(())).unwrap();
    driver
}

/// Connects and authenticates a queue. The controller's messages have their own length, as
/// SPDK's. Returns the last command that was sent, if that was another.
fn authenticate(host: &mut impl LoopbackSession, configured: HostSecrets) -> Option<SentCommand> {
    let (names, configured) = (names(), Some(Arc::new(configured)));
    let mut controller = Authenticator::new(names.host.as_str(), names.subsystem.as_str(), [5; 32]);
    let good = StatusField::default();
    loop {
        let command = host.sent().pop()?;
        let (mut message, mut result) = (Vec::new(), 0);
        match fabrics_type(&command.sqe) {
            _ if command.sqe.opcode != AdminOpcode::FABRICS.0 => return Some(command),
            FabricsType::CONNECT => result = u64::from(AUTHREQ_ATR) | 5,
            FabricsType::AUTHENTICATION_SEND => controller.on_message(&command.data, || configured.clone()),
            FabricsType::AUTHENTICATION_RECEIVE => message = controller.message(MAX_MESSAGE).unwrap(),
            _ => return Some(command),
        }
        host.answer(command.cid(), &message, Some((good, result)));
    }
}

#[test]
fn a_controller_may_return_shorter_messages_than_the_host_asked_for() {
    for controller in [None, secrets(None, None).controller] {
        let own = HostSecrets { controller, ..secrets(None, Some(DhGroup::Ffdhe2048)) };
        let mut host = admin(own.clone());
        let next = authenticate(&mut host.session, secrets(None, None)).unwrap();
        assert_eq!(fabrics_type(&next.sqe), FabricsType::PROPERTY_GET, "{:?}", host.session.refused());
        let mut queues = TestQueues::fresh_with(credentials(own), super::controller(), namespace(), 128);
        assert!(authenticate(queues.driver.session.queue(0), secrets(None, None)).is_none());
        assert!(queues.driver.session.is_ready(), "{:?}", queues.driver.session.refused());
    }
}

#[test]
fn the_reason_of_a_controller_that_rejects_the_host_is_reported_at_once() {
    let right = secrets(None, Some(DhGroup::Null));
    let wrong = HostSecrets { host: right.controller.clone().unwrap(), controller: None, ..right.clone() };
    let rejected = Some(AuthFailure::Rejected(Explanation::AUTHENTICATION_FAILED));
    let mut host = admin(wrong.clone());
    assert!(authenticate(&mut host.session, right.clone()).is_none());
    assert_eq!(host.session.refused().and_then(NvmeRefused::auth_failure), rejected);
    let said = host.session.refused().unwrap().to_string();
    assert!(said.ends_with(" (hmac(sha512), group null)"), "{said}");
    let mut queues = TestQueues::fresh_with(credentials(wrong), super::controller(), namespace(), 128);
    assert!(authenticate(queues.driver.session.queue(0), right).is_none());
    assert_eq!(queues.driver.session.refused().and_then(NvmeRefused::auth_failure), rejected);
}

/// Linux's controller closes the connection of a host that it rejects, sometimes before its reason
/// is sent.
#[test]
fn a_controller_that_closes_the_connection_during_authentication_has_rejected_the_host() {
    for is_last in [false, true] {
        let mut host = admin(secrets(None, Some(DhGroup::Null)));
        let connect = host.session.sent().pop().unwrap();
        if !is_last {
            host.session.on_lost().unwrap_err();
            assert_eq!(host.session.refused(), None, "it may be out of reach");
            continue;
        }
        let required = Some((StatusField::default(), u64::from(AUTHREQ_ATR) | 5));
        host.session.answer(connect.cid(), &[], required);
        assert_eq!(fabrics_type(&host.session.sent().pop().unwrap().sqe), FabricsType::AUTHENTICATION_SEND);
        host.session.on_lost().unwrap_err();
        assert_eq!(host.session.refused(), Some(&NvmeRefused::unchallenged(AuthFailure::Closed)));
    }
}

/// Challenge and Success1 of SPDK 26.09, for a host with the names, secrets and seed of these
/// tests: SHA-512 without a group, and SHA-384 with ffdhe2048.
const SPDK: [(Hash, DhGroup, [&str; 2]); 2] = [
    (
        Hash::Sha512,
        DhGroup::Null,
        [
            "0101000088ea40000300000033625209c692bc6a98bdbe579bc270784a3f21e58469e02e53dbe1bbf1c4e448\
        c34aa63cf82c1553042d1143e40a78fc3001c049849a5b70594d5a28bdf74fb7f178fd4a",
            "0103000088ea40000100000000000000f7a1b07670e287b5e96adfd86221347f032828c1bc919cc76d6acea7\
        65373cce3cf4d848b72e0e8374c41786838b5068abb36e4083364a95d4b7f655d9532dbd",
        ],
    ),
    (
        Hash::Sha384,
        DhGroup::Ffdhe2048,
        [
            "0101000088ea3000020100013462520900b9e0863300d5fc161177a8947976fdabbf99f99b8b90fbac569290\
        873bd2a6b28d5a2b2e5a1743bade4d53060c3012a807528e01c23a944bc2294bd63385c695239b8c83e933e5\
        1334c5e012cdeaec748b1ee46aef56499a747ce43b2f8c2128110f60ac0428e40085264dc7cdb755133de91b\
        173e4d2095014fa5d766a58502544110159cc4d3f4b3a8d18f5594eb74a7a72a51542aa75779971715448acf\
        c903e1882aa000869ddfca592695ac807961fd95d23298ae20d3c684dc6eeb4725807e9fe8976d7419c10448\
        3b71c58874ba50424fca293357758773e37534989d5c5308f8462017c0e16a25404010a932dd6a792f6563a0\
        796961b16862c427f525f96e7e8cf51921d12832e3d7485507700262cca61dbab3137383112ef1b6474c5760\
        fe4c1445b54de1b7101d0a72",
            "0103000088ea30000100000000000000a636fe48b4d4f048452b1f8786cdd7a3dd5bd7d53fbb19e31919d552\
        fcc372f29af6ca2c64e593f93acaebb69fbff364",
        ],
    ),
];

#[test]
fn recorded_messages_of_spdk_authenticate_both_sides() {
    for (hash, group, messages) in SPDK {
        for is_damaged in [false, true] {
            let mut recorded = messages.map(|hex| HEXLOWER.decode(hex.as_bytes()).unwrap());
            if is_damaged {
                *recorded[1].last_mut().unwrap() ^= 1;
            }
            let mut recorded = recorded.into_iter();
            let mut host = admin(secrets(Some(hash), Some(group)));
            let mut last = None;
            while let Some(command) = host.session.sent().pop() {
                last = Some(fabrics_type(&command.sqe));
                let (message, result) = match fabrics_type(&command.sqe) {
                    FabricsType::CONNECT => (Vec::new(), u64::from(AUTHREQ_ATR) | 5),
                    FabricsType::AUTHENTICATION_SEND => (Vec::new(), 0),
                    FabricsType::AUTHENTICATION_RECEIVE => (recorded.next().unwrap(), 0),
                    _ => break,
                };
                host.session.answer(command.cid(), &message, Some((StatusField::default(), result)));
            }
            let impostor = is_damaged.then_some(AuthFailure::WrongControllerResponse);
            let failure = host.session.refused().and_then(NvmeRefused::auth_failure);
            assert_eq!(failure, impostor, "{hash:?} {group:?}");
            assert_eq!(last == Some(FabricsType::PROPERTY_GET), !is_damaged);
        }
    }
}
