//! The volume conformance suite over iSCSI: a target on a core of its own, and a remote volume on
//! the test's core.

mod conforms;
mod sides;

use blockmux_engine::carrier::blocking::{FirstConnection, run_session};
use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_engine::net::socket::{Address, Listener};
use blockmux_engine::protocol::iscsi::initiator::{IscsiEndpoint, OverTcp, connect, discover, luns};
use blockmux_engine::protocol::iscsi::target;
use blockmux_engine::remote::RemoteVolume;
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerTask};
use blockmux_engine::volume::file::{FileOptions, FileVolume};
use blockmux_proto::iscsi::client::{IscsiInitiatorSession, SessionPurpose, default_proposal};
use blockmux_proto::iscsi::login::operational::{CRC32C, OperationalKey, OperationalParameters};
use blockmux_proto::iscsi::name::Name;
use blockmux_proto::scsi::Lun;
use blockmux_volume::{MemVolume, Pool, Volume};
use blockmux_wire::iscsi::session::LoginStatus;
use conforms::{conforms, disk_and_frozen};
use sides::iscsi::{IscsiDialer, node, target_name};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Serves one volume, also as `frozen`, which refuses writes, until it is dropped.
struct Target {
    address: Address,
    _cores: Cores,
}

impl Target {
    fn serve(volume: Arc<dyn Volume>) -> Target {
        let listener = Listener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).unwrap();
        let address = listener.address().clone();
        let cores =
            Cores::start(&CoresConfig { policy: PollPolicy::Never, ..CoresConfig::default() }).unwrap();
        let exports = disk_and_frozen(&volume);
        let (serve, inboxes) = (target::serve(&node(&exports), &exports, 1), cores.inboxes());
        cores.inboxes()[0].send(move |core| {
            ListenerTask::spawn(core, listener, inboxes, serve, ConnectionLimit::new(64));
        });
        Target { address, _cores: cores }
    }

    /// Runs the suite with these parameters proposed.
    fn conforms(&self, proposal: OperationalParameters, connections: u32) {
        let [volume, read_only] = ["disk", "frozen"].map(|export| -> Arc<dyn Volume> {
            let dialer = IscsiDialer::new(&self.address, export, proposal);
            let mut session =
                dialer.log_in(SessionPurpose::Describe, u32::MAX, &Pool::new(1 << 20), Instant::now());
            let is_over = |session: &FirstConnection<'_, IscsiInitiatorSession>| session.0.is_over();
            run_session(&self.address, None, &mut FirstConnection(&mut session), TIMEOUT, is_over).unwrap();
            let info = session.unit().unwrap().volume_info();
            Arc::new(RemoteVolume::<_>::new(dialer, info, connections, TIMEOUT))
        });
        conforms(volume, Some(read_only));
    }
}

fn ram() -> Arc<dyn Volume> {
    Arc::new(MemVolume::new(SIZE))
}

#[test]
fn a_ram_volume_conforms_over_one_session() {
    Target::serve(ram()).conforms(default_proposal(), 1);
}

#[test]
fn a_ram_volume_conforms_over_three_sessions_with_digests() {
    let digests = default_proposal()
        .with(OperationalKey::HeaderDigest, CRC32C)
        .with(OperationalKey::DataDigest, CRC32C);
    Target::serve(ram()).conforms(digests, 3);
}

#[test]
fn a_ram_volume_conforms_with_solicited_writes_in_small_segments() {
    let slow = default_proposal()
        .with(OperationalKey::InitialR2T, 1)
        .with(OperationalKey::ImmediateData, 0)
        .with(OperationalKey::FirstBurstLength, 64 << 10)
        .with(OperationalKey::MaxBurstLength, 64 << 10)
        .with(OperationalKey::MaxRecvDataSegmentLength, 8 << 10);
    Target::serve(ram()).conforms(slow, 1);
}

#[test]
fn a_file_conforms() {
    let folder = tempfile::tempdir().unwrap();
    let options = FileOptions { size: Some(SIZE), create: true, ..FileOptions::default() };
    let file = FileVolume::open(folder.path().join("disk"), options).unwrap();
    Target::serve(Arc::new(file)).conforms(default_proposal(), 2);
}

#[test]
fn a_unit_named_by_an_endpoint_conforms() {
    let target = Target::serve(ram());
    let initiator = Name::new("iqn.2026-11.i:me").unwrap();
    let (found, left_out) = discover(&target.address, &initiator, None, &OverTcp).unwrap();
    let names: Vec<_> = found.iter().map(|target| target.name.as_str()).collect();
    assert_eq!((names, left_out), (vec!["iqn.2026-11.t:disk", "iqn.2026-11.t:frozen"], 0));
    let endpoint = |export| IscsiEndpoint { target: target_name(export), ..endpoint_at(&target.address) };
    assert_eq!(
        luns(&IscsiEndpoint { lun: Lun::new(9), ..endpoint("disk") }, &OverTcp).unwrap(),
        [Lun::new(0)]
    );
    let [volume, read_only] = ["disk", "frozen"]
        .map(|export| -> Arc<dyn Volume> { Arc::new(connect(endpoint(export), OverTcp).unwrap()) });
    conforms(volume, Some(read_only));
}

/// Starts a portal that redirects every login to `to`. Returns the number of logins, and its
/// address. It ends with the test.
fn redirector(status: LoginStatus, to: impl Fn() -> String + Send + 'static) -> (Arc<AtomicUsize>, Address) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = Address::Tcp(listener.local_addr().unwrap());
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    std::thread::spawn(move || {
        while let Ok((mut socket, _)) = listener.accept() {
            let mut request = [0; 48];
            socket.read_exact(&mut request).unwrap();
            let len = usize::from(u16::from_be_bytes([request[6], request[7]]));
            socket.read_exact(&mut vec![0; len.next_multiple_of(4)]).unwrap();
            count.fetch_add(1, Ordering::Relaxed);
            let mut text = format!("TargetAddress={},1\0", to()).into_bytes();
            // A login response (RFC 7143 §11.13) with the length of its text, the Initiator Task
            // Tag, and a status.
            let mut response = [0; 48];
            (response[0], response[7]) = (0x23, text.len() as u8);
            response[16..20].copy_from_slice(&request[16..20]);
            response[36..38].copy_from_slice(&status.0.to_be_bytes());
            text.resize(text.len().next_multiple_of(4), 0);
            socket.write_all(&[&response[..], &text].concat()).unwrap();
        }
    });
    (asked, address)
}

fn endpoint_at(address: &Address) -> IscsiEndpoint {
    IscsiEndpoint {
        address: address.clone(),
        further: Vec::new(),
        initiator: Name::new("iqn.2026-11.i:me").unwrap(),
        target: target_name("disk"),
        lun: Lun::new(0),
        chap: None,
        current_chap: None,
        proposal: default_proposal(),
        connections: 2,
        reconnect_timeout: TIMEOUT,
        timeout: Some(TIMEOUT),
    }
}

#[test]
fn redirections_are_followed_and_only_permanent_ones_are_remembered() {
    for (status, expected) in
        [(LoginStatus::TARGET_MOVED_TEMPORARILY, 6), (LoginStatus::TARGET_MOVED_PERMANENTLY, 2)]
    {
        let target = Target::serve(ram());
        let target_address = target.address.to_string();
        let (asked, address) = redirector(status, move || target_address.clone());
        let frozen = IscsiEndpoint { target: target_name("frozen"), ..endpoint_at(&address) };
        let [volume, read_only] = [endpoint_at(&address), frozen]
            .map(|endpoint| -> Arc<dyn Volume> { Arc::new(connect(endpoint, OverTcp).unwrap()) });
        conforms(volume, Some(read_only));
        // Each of the two volumes logs in once to describe its unit, and then for every session of
        // every channel.
        let asked = asked.load(Ordering::Relaxed);
        assert!(if expected == 2 { asked == 2 } else { asked >= expected }, "{status}: {asked}");
    }
}

#[test]
fn a_redirection_loop_is_refused_and_names_both_targets() {
    let first = Arc::new(OnceLock::new());
    let first_address = first.clone();
    let (_, second) =
        redirector(LoginStatus::TARGET_MOVED_PERMANENTLY, move || Address::to_string(first_address.wait()));
    let second_address = second.to_string();
    let (_, address) = redirector(LoginStatus::TARGET_MOVED_TEMPORARILY, move || second_address.clone());
    first.set(address.clone()).unwrap();
    let error = connect(endpoint_at(&address), OverTcp).err().unwrap().to_string();
    let expected =
        format!("target at {second} redirects to {address},1, which was already visited: a redirection loop");
    assert!(error.ends_with(&expected), "{error}");
}

const TIMEOUT: Duration = Duration::from_secs(30);
/// Larger than the largest transfer.
const SIZE: u64 = 40 << 20;
