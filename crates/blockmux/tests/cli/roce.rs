//! The protocols over software RoCEv2: target and initiator with each other, on addresses of
//! loopback that no other test uses.

use crate::copy_source::{CopySource, a_copy_survives_a_kill};
use crate::daemon::Daemon;
use crate::program::{blockmux, succeeds, text};
use crate::raw_client::RawClient;
use crate::raw_iscsi::{GOOD, RawIscsi};
use crate::reload::Configured;
use blockmux_proto::srp::node::SrpPortId;
use blockmux_wire::roce::UDP_PORT;
use blockmux_wire::roce::bth::{Bth, P_KEY_DEFAULT, QP_GSI, U24};
use blockmux_wire::roce::cm::{
    CmAttribute, CmDrep, CmDreq, CmMessage, CmRej, CmRep, CmReq, CmRtu, IP_CM_LEN, IpCmHeader, MadHeader,
    RejectReason, gid, service_id,
};
use blockmux_wire::roce::eth::{Deth, Q_KEY_GSI};
use blockmux_wire::roce::icrc::{Fragmentation, RoceAddresses, RoceFlow};
use blockmux_wire::roce::opcode::RoceOpcode;
use blockmux_wire::roce::packet::RocePacket;
use blockmux_wire::srp::{BUFFER_FORMAT_DIRECT, LoginRequestRdma, SrpOpcode};
use serde_json::Value;
use std::net::{Ipv4Addr, TcpListener, UdpSocket};
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::Duration;
use zerocopy::{FromBytes, FromZeros, IntoBytes, U16, U32, U64};

/// Options of listeners of all three protocols, and the address that they are at.
struct Listeners {
    ip: String,
    options: Vec<String>,
}

impl Listeners {
    /// At an address of its own, because all programs of an address share one UDP port.
    fn new(parameters: &str) -> Listeners {
        static COUNT: AtomicU8 = AtomicU8::new(200);
        let [.., high, low] = std::process::id().to_be_bytes();
        let ip = format!("127.{}.{high}.{low}", COUNT.fetch_add(1, Ordering::Relaxed));
        let at = |option: &str| [format!("--{option}"), format!("{ip}:0?rdma=roce{parameters}")];
        let options = ["iscsi", "srp", "nvme-tcp"].into_iter().flat_map(at).collect();
        Listeners { ip, options }
    }

    fn serve(&self, volume: &str) -> Daemon {
        let options = self.options.iter().map(String::as_str);
        Daemon::serve(&std::iter::once(volume).chain(options).collect::<Vec<_>>())
    }
}

/// The URLs of a daemon's volume over iWARP, and over RoCEv2, as it prints them.
fn urls(daemon: &Daemon) -> Vec<(String, String)> {
    let of = |scheme| {
        let [iwarp, roce] = <[String; 2]>::try_from(daemon.urls_of(scheme)).unwrap();
        assert_eq!(iwarp.replace("rdma=iwarp", "rdma=roce"), roce);
        (iwarp, roce)
    };
    ["iser", "srp", "nvme+rdma"].map(of).into()
}

#[test]
fn data_copied_over_roce_and_back_is_unchanged_with_every_protocol() {
    let daemon = Listeners::new("").serve("mem:16m");
    for (seed, (iwarp, roce)) in (1..).zip(urls(&daemon)) {
        let source = CopySource::new(16, seed);
        for (there, back) in [(&roce, &iwarp), (&iwarp, &roce), (&roce, &roce)] {
            source.survives_there_and_back(there, back, &[]);
        }
    }
}

#[test]
fn a_volume_is_described_over_roce_as_over_iwarp() {
    let daemon = Listeners::new("").serve("a=mem:8m");
    for (iwarp, roce) in urls(&daemon) {
        let told =
            |url: &str| -> Value { serde_json::from_str(&succeeds(&["info", "--json", url])).unwrap() };
        let (first, second) = (told(&iwarp), told(&roce));
        for key in ["protocol", "size", "serial"] {
            assert_eq!(first[key], second[key], "{key} of {roce}");
        }
    }
}

#[test]
fn several_connections_of_a_session_have_queue_pairs_of_their_own() {
    let source = CopySource::new(16, 7);
    let daemon = Listeners::new("").serve("mem:16m");
    for (_, roce) in urls(&daemon) {
        let several = format!("{roce}&connections=4");
        source.survives_there_and_back(&several, &several, &["--bs", "64k", "--iodepth", "32"]);
    }
}

fn a_copy_survives(protocol: usize) {
    let listeners = Listeners::new("");
    let serve = |volume: &str| {
        let daemon = listeners.serve(volume);
        let url = urls(&daemon).remove(protocol).1;
        (daemon, url)
    };
    let option = listeners.options[2 * protocol].clone();
    a_copy_survives_a_kill(serve, |address| [option, format!("{address}?rdma=roce")]);
}

#[test]
fn a_copy_over_iser_survives_a_kill_and_restart_of_the_target() {
    a_copy_survives(0);
}

#[test]
fn a_copy_over_srp_survives_a_kill_and_restart_of_the_target() {
    a_copy_survives(1);
}

#[test]
fn a_copy_over_nvme_rdma_survives_a_kill_and_restart_of_the_target() {
    a_copy_survives(2);
}

#[test]
fn hostile_datagrams_do_not_affect_other_connections() {
    let listeners = Listeners::new("");
    let daemon = listeners.serve("mem:1m");
    let stranger = UdpSocket::bind((listeners.ip.as_str(), 0)).unwrap();
    let port = (listeners.ip.as_str(), 4791);
    let mut random = 1_u64;
    for len in (0..2000).chain([9000, 60_000]) {
        let bytes: Vec<u8> = (0..len)
            .map(|_| {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (random >> 56) as u8
            })
            .collect();
        stranger.send_to(&bytes, port).unwrap();
        // A connection request by its first bytes, and a packet of a queue pair.
        for begin in
            [&b"\x64\0\xff\xff\0\0\0\x01\0\0\0\0\x80\x01\0\0\0\0\0\x01"[..], b"\x0a\0\xff\xff\0\0\0\x55"]
        {
            stranger.send_to(&[begin, &bytes].concat(), port).ok();
        }
    }
    for (_, roce) in urls(&daemon) {
        succeeds(&["info", &roce]);
    }
}

/// The datagram of a stranger who requests a channel as the only one of an initiator port, with
/// this communication identifier.
fn forged_login(
    source: Ipv4Addr,
    destination: Ipv4Addr,
    service: u16,
    [initiator, target]: [SrpPortId; 2],
    comm_id: u32,
) -> Vec<u8> {
    let login = LoginRequestRdma {
        opcode: SrpOpcode::LOGIN_REQUEST.0,
        req_it_iu_len: 8260.into(),
        req_buf_fmt: BUFFER_FORMAT_DIRECT.into(),
        initiator_port_id: initiator.0,
        target_port_id: target.0,
        ..LoginRequestRdma::default()
    };
    let mut req = CmReq {
        local_comm_id: U32::new(comm_id),
        service_id: U64::new(service_id(service)),
        local_qpn: U24::new(17),
        responder_resources: 16,
        initiator_depth: 16,
        p_key: U16::new(P_KEY_DEFAULT),
        path_mtu: 3 << 4,
        local_gid: gid(source.into()),
        remote_gid: gid(destination.into()),
        ..CmReq::new_zeroed()
    };
    let (ip, rest) = req.private_data.split_at_mut(IP_CM_LEN);
    ip.copy_from_slice(IpCmHeader::new(source.into(), 1, destination.into()).as_bytes());
    rest[..size_of_val(&login)].copy_from_slice(login.as_bytes());
    management(source, destination, CmAttribute::REQ, req.as_bytes())
}

/// The datagram with a message of connection management.
fn management(source: Ipv4Addr, destination: Ipv4Addr, attribute: CmAttribute, body: &[u8]) -> Vec<u8> {
    let bth = Bth {
        opcode: RoceOpcode::UD_SEND_ONLY.0,
        p_key: U16::new(P_KEY_DEFAULT),
        dest_qp: U24::new(QP_GSI),
        ..Bth::new_zeroed()
    };
    let deth = Deth { q_key: U32::new(Q_KEY_GSI), reserved: 0, source_qp: U24::new(QP_GSI) };
    let mad = MadHeader::new(attribute, 1);
    let mut packet = [bth.as_bytes(), deth.as_bytes(), mad.as_bytes(), body].concat();
    let flow = RoceFlow { addresses: RoceAddresses::V4 { source, destination }, source_port: UDP_PORT };
    packet.extend(flow.icrc(Fragmentation { identification: 0, dont_fragment: true }, &packet));
    packet
}

/// The port number of the SRP listener among the URLs of a daemon.
fn srp_service(urls: &[(String, String)]) -> u16 {
    urls[1].1.split('/').nth(2).unwrap().rsplit(':').next().unwrap().parse().unwrap()
}

/// A login in a request that its sender follows up with nothing, as somebody who forges addresses
/// cannot, would otherwise end the channels of that initiator port.
#[test]
fn a_forged_srp_login_does_not_end_the_channels_of_its_initiator_port() {
    let from = CopySource::new(4, 5);
    let (listeners, stranger) = (Listeners::new(""), Listeners::new(""));
    // Slow enough that the copy goes on while requests are forged, as later writes prove.
    let mut daemon = listeners.serve("log:-:delay:5ms:mem:4m");
    let url = urls(&daemon).remove(1).1;
    let place = url.split_once("://").unwrap().1.to_owned();
    let copy = thread::spawn(move || {
        blockmux(["copy", "--overwrite", "--verify", "--bs", "4k", "--iodepth", "1", &from.spec(), &url])
    });
    let login = daemon.wait_for_line("login protocol=\"srp\"");
    let named = |key: &str| {
        let value = login.split_once(&format!("{key}=\"")).unwrap().1.split('"').next().unwrap();
        SrpPortId::parse(value).unwrap()
    };
    let ports = [named("initiator"), named("target")];
    let service = place.split('/').next().unwrap().rsplit(':').next().unwrap().parse().unwrap();
    daemon.wait_for_line(" write ");
    let [source, destination] = [&stranger.ip, &listeners.ip].map(|ip| ip.parse().unwrap());
    let socket = UdpSocket::bind((source, UDP_PORT)).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    socket.send_to(&forged_login(source, destination, service, ports, 7), (destination, UDP_PORT)).unwrap();
    let mut reply = [0; 2048];
    let len = socket.recv(&mut reply).unwrap();
    let reply = RocePacket::parse(&reply[..len]).unwrap();
    assert!(matches!(CmMessage::parse(reply.payload), Some((_, CmMessage::Rep(_)))), "it is accepted");
    for _ in 0..50 {
        daemon.wait_for_line(" write ");
    }
    let output = copy.join().unwrap();
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
}

/// A peer that sends datagrams by itself.
struct RawPeer {
    socket: UdpSocket,
    source: Ipv4Addr,
    destination: Ipv4Addr,
}

impl RawPeer {
    fn new(listeners: &Listeners) -> RawPeer {
        let [source, destination] = [&Listeners::new("").ip, &listeners.ip].map(|ip| ip.parse().unwrap());
        let socket = UdpSocket::bind((source, UDP_PORT)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        RawPeer { socket, source, destination }
    }

    fn send(&self, packet: &[u8]) {
        self.socket.send_to(packet, (self.destination, UDP_PORT)).unwrap();
    }

    fn send_message(&self, attribute: CmAttribute, body: &[u8]) {
        self.send(&management(self.source, self.destination, attribute, body));
    }

    /// The next message of connection management. Other packets are lost.
    fn message(&self) -> (CmAttribute, Vec<u8>) {
        loop {
            let mut bytes = [0; 16 << 10];
            let len = self.socket.recv(&mut bytes).unwrap();
            let packet = RocePacket::parse(&bytes[..len]).unwrap();
            if let Some((_, message)) = CmMessage::parse(packet.payload) {
                let (attribute, body) = message.parts();
                return (attribute, body.to_vec());
            }
        }
    }

    /// A message of this kind.
    fn expect<Body: FromBytes>(&self, attribute: CmAttribute) -> Body {
        let (answered, body) = self.message();
        assert_eq!(answered, attribute);
        Body::read_from_bytes(&body).unwrap()
    }
}

/// The answer to a release may be lost, and a peer may be restarted with the numbers that it had.
#[test]
fn stale_requests_and_repeated_releases_of_the_only_connection_are_answered() {
    let listeners = Listeners::new("");
    let mut daemon = listeners.serve("mem:1m");
    let service = srp_service(&urls(&daemon));
    let target = SrpPortId::parse(daemon.urls_of("srp")[1].split('/').nth(3).unwrap()).unwrap();
    let peer = RawPeer::new(&listeners);
    let login = |comm_id| {
        let ports = [SrpPortId::parse(&"2".repeat(32)).unwrap(), target];
        peer.send(&forged_login(peer.source, peer.destination, service, ports, comm_id));
    };
    login(7);
    let rep: CmRep = peer.expect(CmAttribute::REP);
    let (local_comm_id, remote_comm_id) = (U32::new(7), rep.local_comm_id);
    let rtu = CmRtu { local_comm_id, remote_comm_id, ..CmRtu::new_zeroed() };
    peer.send_message(CmAttribute::RTU, rtu.as_bytes());
    daemon.wait_for_line("login protocol=\"srp\"");
    login(8);
    let rej: CmRej = peer.expect(CmAttribute::REJ);
    assert_eq!((rej.reason.get(), rej.remote_comm_id.get()), (RejectReason::STALE_CONNECTION.0, 8));
    let dreq = CmDreq { local_comm_id, remote_comm_id, remote_qpn: rep.local_qpn, ..CmDreq::new_zeroed() };
    for round in 0..100 {
        peer.send_message(CmAttribute::DREQ, dreq.as_bytes());
        let drep: CmDrep = peer.expect(CmAttribute::DREP);
        assert_eq!((drep.local_comm_id, drep.remote_comm_id.get()), (rep.local_comm_id, 7));
        if round == 0 {
            let end = daemon.wait_for_line("protocol=\"srp\"");
            assert!(!end.contains("login"), "{end}");
        }
    }
    login(8);
    let _: CmRep = peer.expect(CmAttribute::REP);
}

/// Nobody who forges addresses can establish what he has requested, so it must cost little and give
/// way to others.
#[test]
fn a_flood_of_requests_costs_bounded_memory_and_keeps_nobody_out() {
    let (listeners, strangers) = (Listeners::new(""), Listeners::new(""));
    let daemon = listeners.serve("mem:1m");
    let urls = urls(&daemon);
    let service = srp_service(&urls);
    let destination: Ipv4Addr = listeners.ip.parse().unwrap();
    let first: Ipv4Addr = strangers.ip.parse().unwrap();
    let [.., high, low] = first.octets();
    let target = SrpPortId::parse(&"1".repeat(32)).unwrap();
    let idle = daemon.resident();
    for round in 0..4 {
        // A few from each of many addresses, then many from few.
        let (addresses, requests) = if round % 2 == 0 { (120, 10) } else { (4, 300) };
        for address in 0..addresses {
            let source = Ipv4Addr::new(127, address, high, low);
            let socket = UdpSocket::bind((source, UDP_PORT)).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
            for comm_id in 0..requests {
                let initiator = SrpPortId::parse(&format!("{address:016x}{comm_id:016x}")).unwrap();
                let login =
                    forged_login(source, destination, service, [initiator, target], round << 16 | comm_id);
                // What is answered has been looked at. Requests that come too fast are ignored.
                let mut is_answered = false;
                while !is_answered {
                    socket.send_to(&login, (destination, UDP_PORT)).unwrap();
                    is_answered = socket.recv(&mut [0; 2048]).is_ok();
                }
            }
        }
        for (_, roce) in &urls {
            succeeds(&["info", roce]);
        }
        let more = daemon.resident().saturating_sub(idle);
        assert!(more < FLOOD_LIMIT, "{more} bytes more after round {round}");
    }
}

#[test]
fn an_initiator_that_the_allow_list_does_not_have_is_refused_at_once() {
    let mut daemon = Listeners::new("&allow=192.0.2.0/24").serve("mem:1m");
    let (_, roce) = urls(&daemon).remove(1);
    let output = blockmux(["info", &roce]);
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    daemon.wait_for_line("does not have this address");
}

#[test]
fn a_reload_that_removes_the_fabric_of_a_listener_ends_the_sessions_over_it_and_no_others() {
    let listeners = Listeners::new("");
    let ip = &listeners.ip;
    let config = |parameters: &str| {
        format!("iscsi = ['{ip}:3261{parameters}']\n[[volume]]\nname = 'a'\nspec = 'mem:4m'\n")
    };
    let served = Configured::serve(&config("?rdma=roce"));
    let url = served.daemon.urls_of("iser").into_iter().find(|url| url.contains("rdma=roce")).unwrap();
    let tcp = served.daemon.urls_of("iscsi").remove(0);
    let mut stays = RawIscsi::login(tcp.split('?').next().unwrap(), "iqn.2026-11.i:tcp");
    let gateway = Daemon::serve(&[&url]);
    let mut client = RawClient::connect(&gateway.socket());
    assert_eq!(client.read(0, 512), [0; 512]);
    let over_roce = || {
        let sessions: Value = serde_json::from_str(&served.said(&["sessions", "--json"])).unwrap();
        let own = sessions.as_array().unwrap().iter().map(|own| own["protocol"].as_str().unwrap().to_owned());
        own.filter(|protocol| protocol == "iser").count()
    };
    assert_eq!(over_roce(), 1);
    served.write(&config(""));
    let plan: Value = serde_json::from_str(&served.said(&["diff", "--json"])).unwrap();
    let affected: Vec<&str> = plan["changes"]
        .as_array()
        .unwrap()
        .iter()
        .flat_map(|change| change["affected"].as_array().unwrap())
        .map(|session| session.as_str().unwrap())
        .collect();
    assert!(affected.len() == 1 && affected[0].starts_with("iser "), "{plan}");
    served.said(&["reload"]);
    assert_eq!(over_roce(), 0);
    assert_eq!(stays.access(), [GOOD; 2]);
    let output = blockmux(["info", &url]);
    assert!(!output.status.success(), "{}", text(&output.stdout));
}

#[test]
fn urls_and_commands_are_printed_once() {
    let daemon = Listeners::new("").serve("mem:1m");
    for scheme in ["iscsi", "nvme+tcp"] {
        assert_eq!(daemon.urls_of(scheme).len(), 1, "{scheme}");
    }
    let commands = daemon.json["exports"][0]["commands"].as_array().unwrap();
    for (at, command) in commands.iter().enumerate() {
        assert!(!commands[..at].contains(command), "{command}");
    }
}

#[test]
fn the_fabric_of_a_url_is_not_chosen_by_an_option_of_the_bench() {
    let daemon = Listeners::new("").serve("mem:1m");
    let (iwarp, _) = urls(&daemon).remove(0);
    let report = daemon.directory.path().join("report");
    let output = blockmux(["bench", &iwarp, "--rdma", "roce", "--report", report.to_str().unwrap()]);
    let expected =
        "blockmux: --rdma roce: is for volumes that bench serves itself; write ?rdma=roce in the URL\n";
    assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(2), expected));
}

#[test]
fn a_target_that_is_not_reached_by_its_udp_port_may_not_listen_there() {
    let Listeners { ip, .. } = Listeners::new("");
    // It has the port, and never answers.
    let _silent = UdpSocket::bind((ip.as_str(), UDP_PORT)).unwrap();
    let output = blockmux(["info", &format!("iser://{ip}/iqn.2026-11.blockmux:a/0?rdma=roce&reconnect=0s")]);
    let said = text(&output.stderr);
    let expected = "check that an iSER target listens there with ?rdma=roce, and that UDP port 4791 passes; or use \
                    ?rdma=iwarp\n";
    assert!(output.status.code() == Some(2) && said.ends_with(expected), "{said}");
}

#[test]
fn a_port_that_another_program_has_is_named_with_what_to_do() {
    let Listeners { ip, .. } = Listeners::new("");
    let taken = TcpListener::bind((ip.as_str(), 0)).unwrap();
    let listener = format!("{}?rdma=roce", taken.local_addr().unwrap());
    let output = blockmux(["serve", "mem:1m", "--iscsi", &listener]);
    let said = text(&output.stderr);
    let expected = format!("use another port, such as --iscsi '{ip}:0?rdma=roce'\n");
    assert!(output.status.code() == Some(2) && said.ends_with(&expected), "{said}");
    let _taken = UdpSocket::bind((ip.as_str(), UDP_PORT)).unwrap();
    let output = blockmux(["serve", "mem:1m", "--iscsi", &format!("{ip}:0?rdma=roce")]);
    let said = text(&output.stderr);
    let expected = format!("cannot listen on {ip} for RoCEv2: another program has UDP port 4791 of {ip}; ");
    assert!(output.status.code() == Some(2) && said.contains(&expected), "{said}");
    assert!(said.ends_with("; listen at another address, or stop it (`ss -lunp` names it)\n"), "{said}");
}

#[test]
fn roce_is_refused_where_it_has_no_meaning() {
    let refuses = |words: &[&str], why: &str| {
        let output = blockmux(words);
        assert_eq!(output.status.code(), Some(2), "{words:?}");
        assert!(text(&output.stderr).contains(why), "{words:?}: {}", text(&output.stderr));
    };
    refuses(&["serve", "mem:1m", "--nbd", "127.0.0.1:0?rdma=roce"], "the protocol has no form over RDMA");
    refuses(&["serve", "mem:1m", "--iscsi", "unix:/x?rdma=roce"], "RDMA needs an IP address");
    refuses(
        &["serve", "mem:1m", "--iscsi", "127.0.0.1:0?rdma=iwarp"],
        "every listener of a protocol over RDMA accepts iWARP; remove rdma=iwarp",
    );
    refuses(&["info", "iser://h?rdma=roce&crc=on"], "packets of RoCEv2 always have a CRC");
    refuses(&["info", "iser://h?crc=on&rdma=roce"], "write iwarp, because of crc=on");
}

/// Bytes that a daemon may need for connections that were requested and are not established.
const FLOOD_LIMIT: u64 = 64 << 20;
