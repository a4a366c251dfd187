//! Several connections of one iSCSI session, over sockets and cores. A connection is served on the
//! core of its session, whichever core accepts it.

mod sides;

use blockmux_engine::core::cores::{Cores, CoresConfig};
use blockmux_engine::core::reactor::PollPolicy;
use blockmux_engine::net::socket::{Address, Listener};
use blockmux_engine::protocol::iscsi::target;
use blockmux_engine::serve::listener::{ConnectionLimit, ListenerTask};
use blockmux_proto::exports::{Export, Exports};
use blockmux_volume::MemVolume;
use sides::iscsi::node;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A target on several cores, to which its listener distributes connections round-robin.
struct Target {
    address: SocketAddr,
    limit: ConnectionLimit,
    _cores: Cores,
}

impl Target {
    fn serve(count: usize, policy: PollPolicy) -> Target {
        let listener = Listener::bind(&Address::Tcp(([127, 0, 0, 1], 0).into())).unwrap();
        let Address::Tcp(address) = *listener.address() else { unreachable!("it is bound to TCP") };
        let cores = Cores::start(&CoresConfig { policy, count, ..CoresConfig::default() }).unwrap();
        let exports = Exports::new(vec![Export {
            name: "disk".to_owned(),
            description: String::new(),
            read_only: false,
            volume: Arc::new(MemVolume::new(1 << 20)),
        }]);
        let (serve, inboxes) = (target::serve(&node(&exports), &exports, 1), cores.inboxes());
        let limit = ConnectionLimit::new(64);
        let shared = limit.clone();
        cores.inboxes()[0].send(move |core| ListenerTask::spawn(core, listener, inboxes, serve, shared));
        Target { address, limit, _cores: cores }
    }
}

impl Target {
    /// Waits until no connection has any state left.
    fn wait_until_empty(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.limit.open() > 0 {
            assert!(Instant::now() < deadline, "{} connections stay open", self.limit.open());
            std::thread::yield_now();
        }
    }
}

/// A connection of a hand-written initiator, without digests.
struct Connection(TcpStream);

impl Connection {
    /// Logs in to a new session, or to the session with that TSIH; returns the TSIH.
    fn log_in(target: &Target, tsih: u16, cid: u16, keys: &str) -> (Connection, u16) {
        let mut connection = Connection(TcpStream::connect(target.address).unwrap());
        connection.0.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let text = format!("InitiatorName=iqn.2026-11.i:me\0TargetName=iqn.2026-11.t:disk\0{keys}");
        let mut header = [0; 48];
        (header[0], header[1]) = (0x43, 0x87);
        header[8..14].copy_from_slice(&[0x80, 0, 0, 0, 0, 1]);
        header[14..16].copy_from_slice(&tsih.to_be_bytes());
        header[20..22].copy_from_slice(&cid.to_be_bytes());
        // CmdSN.
        header[27] = 1;
        connection.send(header, text.as_bytes());
        let (response, _) = connection.receive();
        assert_eq!((response[0], response[36], response[37]), (0x23, 0, 0), "the login succeeds");
        (connection, u16::from_be_bytes([response[14], response[15]]))
    }

    fn send(&mut self, mut header: [u8; 48], data: &[u8]) {
        header[4..8].copy_from_slice(&(data.len() as u32).to_be_bytes());
        let mut bytes = [&header[..], data].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        self.0.write_all(&bytes).unwrap();
    }

    fn receive(&mut self) -> ([u8; 48], Vec<u8>) {
        let mut header = [0; 48];
        self.0.read_exact(&mut header).unwrap();
        let len = u32::from_be_bytes([0, header[5], header[6], header[7]]) as usize;
        let mut data = vec![0; len.next_multiple_of(4)];
        self.0.read_exact(&mut data).unwrap();
        data.truncate(len);
        (header, data)
    }

    /// Sends a command that transfers one block: READ(10), WRITE(10), or TEST UNIT READY.
    fn command(&mut self, cmd_sn: u32, opcode: u8, lba: u8, data: &[u8]) {
        let mut header = [0; 48];
        let (direction, len) = match opcode {
            0x28 => (0x40, 512_u32),
            0x2a => (0x20, 512),
            _ => (0, 0),
        };
        (header[0], header[1]) = (1, 0x81 | direction);
        header[16..20].copy_from_slice(&cmd_sn.to_be_bytes());
        header[20..24].copy_from_slice(&len.to_be_bytes());
        header[24..28].copy_from_slice(&cmd_sn.to_be_bytes());
        (header[32], header[37], header[40]) = (opcode, lba, 1);
        self.send(header, data);
    }
}

#[test]
fn connections_accepted_on_other_cores_move_to_the_core_of_their_session() {
    for policy in [PollPolicy::Never, PollPolicy::ADAPTIVE] {
        let target = Target::serve(3, policy);
        let (mut leading, tsih) = Connection::log_in(&target, 0, 0, "MaxConnections=8\0");
        leading.command(1, 0, 0, b"");
        assert_eq!(leading.receive().0[3], 2, "a unit attention");
        let mut all = vec![leading];
        for cid in 1..8 {
            let (connection, same) = Connection::log_in(&target, tsih, cid, "");
            assert_eq!(same, tsih);
            all.push(connection);
        }
        // Each command is sent before the one with the previous CmdSN.
        let mut cmd_sn = 2;
        for round in 0..20_u8 {
            for (place, connection) in all.iter_mut().enumerate().rev() {
                connection.command(cmd_sn + place as u32, 0x2a, place as u8, &[round; 512]);
            }
            for connection in &mut all {
                let (response, _) = connection.receive();
                assert_eq!((response[0], response[3]), (0x21, 0));
            }
            cmd_sn += all.len() as u32;
            for (place, connection) in all.iter_mut().enumerate() {
                connection.command(cmd_sn + place as u32, 0x28, (place as u8 + 1) % 8, b"");
            }
            for connection in &mut all {
                assert_eq!(connection.receive().1, [round; 512]);
            }
            cmd_sn += all.len() as u32;
        }
        assert_eq!(target.limit.open(), 8);
        drop(all);
        target.wait_until_empty();
    }
}

#[test]
fn a_task_survives_its_connection_until_the_session_times_out() {
    for policy in [PollPolicy::Never, PollPolicy::ADAPTIVE] {
        let target = Target::serve(2, policy);
        let keys = "ErrorRecoveryLevel=2\0DefaultTime2Wait=1\0DefaultTime2Retain=0\0";
        let (mut first, tsih) = Connection::log_in(&target, 0, 0, keys);
        first.command(1, 0, 0, b"");
        first.receive();
        // A write whose data is never sent on this connection.
        let mut header = [0; 48];
        (header[0], header[1]) = (1, 0xa1);
        (header[19], header[22], header[27]) = (2, 2, 2);
        (header[32], header[40]) = (0x2a, 1);
        first.send(header, b"");
        assert_eq!(first.receive().0[0], 0x31);
        drop(first);
        let (mut second, _) = Connection::log_in(&target, tsih, 1, "");
        let mut reassign = [0; 48];
        (reassign[0], reassign[1], reassign[19], reassign[23], reassign[27]) = (0x42, 0x88, 9, 2, 3);
        second.send(reassign, b"");
        let (answer, _) = second.receive();
        assert_eq!((answer[0], answer[2]), (0x22, 0), "{answer:?}");
        let (r2t, _) = second.receive();
        assert_eq!(r2t[0], 0x31);
        let mut data_out = [0; 48];
        (data_out[0], data_out[1], data_out[19]) = (5, 0x80, 2);
        data_out[20..24].copy_from_slice(&r2t[20..24]);
        second.send(data_out, &[7; 512]);
        let (answer, _) = second.receive();
        assert_eq!((answer[0], answer[3]), (0x21, 0));
        second.command(3, 0x28, 0, b"");
        assert_eq!(second.receive().1, [7; 512]);
        drop(second);
        target.wait_until_empty();
    }
}

#[test]
fn a_protocol_error_closes_the_connection_and_the_session_lingers() {
    let target = Target::serve(1, PollPolicy::Never);
    let keys = "ErrorRecoveryLevel=2\0DefaultTime2Wait=1\0DefaultTime2Retain=0\0";
    let (mut first, tsih) = Connection::log_in(&target, 0, 0, keys);
    let mut header = [0; 48];
    (header[0], header[5]) = (1, 0xff);
    first.0.write_all(&header).unwrap();
    let mut rest = Vec::new();
    first.0.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
    let (mut second, same) = Connection::log_in(&target, tsih, 0, "");
    assert_eq!(same, tsih);
    second.command(1, 0, 0, b"");
    assert_eq!(second.receive().0[3], 2, "a unit attention");
    drop(second);
    target.wait_until_empty();
}
