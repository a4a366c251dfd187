//! A minimal iSCSI initiator, for commands that no other tool sends.

use std::io::{Read, Write};
use std::net::TcpStream;

/// One session with a target.
pub(crate) struct RawIscsi {
    socket: TcpStream,
    /// The LUN of commands, below 256.
    pub(crate) lun: u8,
    itt: u32,
    stat_sn: u32,
}

impl RawIscsi {
    /// Logs in to the target of `iscsi://HOST:PORT/TARGET/LUN`, and receives the power-on unit
    /// attention of LUN 0.
    pub(crate) fn login(url: &str, initiator: &str) -> RawIscsi {
        let (address, path) = url.strip_prefix("iscsi://").unwrap().split_once('/').unwrap();
        let target = path.split('/').next().unwrap();
        let keys = format!("InitiatorName={initiator}\0TargetName={target}\0SessionType=Normal\0");
        let mut session = RawIscsi::begin_session(TcpStream::connect(address).unwrap(), &keys);
        assert_eq!(session.run(&[0; 6], &[], 0).0, CHECK_CONDITION);
        session
    }

    /// Logs in to a target at an address; returns the status class and detail if it is refused.
    pub(crate) fn try_login(address: &str, target: &str, initiator: &str) -> Result<RawIscsi, [u8; 2]> {
        let keys = format!("InitiatorName={initiator}\0TargetName={target}\0SessionType=Normal\0");
        RawIscsi::try_session(TcpStream::connect(address).unwrap(), &keys)
    }

    /// Logs in for discovery.
    pub(crate) fn discover(socket: TcpStream, initiator: &str) -> RawIscsi {
        RawIscsi::begin_session(socket, &format!("InitiatorName={initiator}\0SessionType=Discovery\0"))
    }

    fn begin_session(socket: TcpStream, keys: &str) -> RawIscsi {
        RawIscsi::try_session(socket, keys).unwrap_or_else(|status| panic!("refused: {status:?}"))
    }

    fn try_session(socket: TcpStream, keys: &str) -> Result<RawIscsi, [u8; 2]> {
        let mut session = RawIscsi { socket, lun: 0, itt: 0, stat_sn: 0 };
        let mut login = [0; 48];
        // Immediate; from operational negotiation to full feature; the ISID's type is "random".
        (login[0], login[1], login[8]) = (0x43, 0x87, 0x80);
        session.send(login, keys.as_bytes());
        let (head, _) = session.receive();
        assert_eq!(head[0], 0x23, "a login response");
        if head[36] != 0 {
            return Err([head[36], head[37]]);
        }
        assert_eq!(head[1] & 0x83, 0x83, "it is logged in");
        Ok(session)
    }

    /// Sends a command; returns its status and data-in.
    pub(crate) fn run(&mut self, cdb: &[u8], data_out: &[u8], data_in_len: u32) -> (u8, Vec<u8>) {
        self.begin(cdb, data_out, data_in_len);
        self.end()
    }

    /// Sends a command.
    pub(crate) fn begin(&mut self, cdb: &[u8], data_out: &[u8], data_in_len: u32) {
        let mut head = [0; 48];
        let moves = match (data_out.len(), data_in_len) {
            (0, 0) => 0,
            (0, _) => 0x40,
            _ => 0x20,
        };
        (head[0], head[1]) = (0x01, 0x81 | moves);
        let expected = data_in_len.max(data_out.len() as u32);
        head[9] = self.lun;
        head[20..24].copy_from_slice(&expected.to_be_bytes());
        head[24..28].copy_from_slice(&self.itt.to_be_bytes());
        head[32..32 + cdb.len()].copy_from_slice(cdb);
        self.send(head, data_out);
    }

    /// Receives the status of a command, and its data-in.
    pub(crate) fn end(&mut self) -> (u8, Vec<u8>) {
        let mut data_in = Vec::new();
        loop {
            let (head, data) = self.receive();
            match head[0] {
                0x25 => {
                    data_in.extend(data);
                    if head[1] & 1 != 0 {
                        return (head[3], data_in);
                    }
                }
                0x21 => return (head[3], data_in),
                other => panic!("a PDU with opcode {other:#x}"),
            }
        }
    }

    /// A page of vital product data.
    pub(crate) fn inquiry_page(&mut self, page_code: u8) -> Vec<u8> {
        let (status, page) = self.run(&[0x12, 1, page_code, 4, 0, 0], &[], 1024);
        assert_eq!(status, GOOD);
        page
    }

    /// PERSISTENT RESERVE OUT with a basic parameter list.
    pub(crate) fn reserve_out(&mut self, action: u8, kind: u8, keys: [u64; 2], flags: u8) -> u8 {
        let mut list = keys.map(u64::to_be_bytes).concat();
        list.extend([0, 0, 0, 0, flags, 0, 0, 0]);
        self.run(&[0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0], &list, 0).0
    }

    /// PERSISTENT RESERVE IN.
    pub(crate) fn reserve_in(&mut self, action: u8) -> Vec<u8> {
        let (status, data) = self.run(&[0x5e, action, 0, 0, 0, 0, 0, 4, 0, 0], &[], 1024);
        assert_eq!(status, GOOD);
        data
    }

    /// The statuses of a READ and of a WRITE of the first block.
    pub(crate) fn access(&mut self) -> [u8; 2] {
        let read = self.run(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[], 512).0;
        [read, self.run(&[0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0], &[0; 512], 0).0]
    }

    /// AsyncEvent and Parameter3 of the next PDU, which must be an Asynchronous Message.
    pub(crate) fn event(&mut self) -> (u8, u16) {
        let (head, _) = self.receive();
        assert_eq!(head[0], 0x32, "an asynchronous message");
        (head[36], u16::from_be_bytes([head[42], head[43]]))
    }

    /// Executes a LOGICAL UNIT RESET; returns the response.
    pub(crate) fn reset_unit(&mut self) -> u8 {
        let mut head = [0; 48];
        (head[0], head[1], head[9]) = (0x42, 0x85, self.lun);
        head[24..28].copy_from_slice(&self.itt.to_be_bytes());
        self.send(head, &[]);
        let (head, _) = self.receive();
        assert_eq!(head[0], 0x22, "a task management response");
        head[2]
    }

    /// Logs out; returns the response.
    pub(crate) fn log_out(&mut self) -> u8 {
        let mut head = [0; 48];
        (head[0], head[1]) = (0x46, 0x80);
        self.send(head, &[]);
        let (head, _) = self.receive();
        assert_eq!(head[0], 0x26, "a logout response");
        head[2]
    }

    /// Whether the target has closed the connection without sending anything.
    pub(crate) fn is_closed(&mut self) -> bool {
        self.socket.read(&mut [0]).unwrap() == 0
    }

    fn send(&mut self, mut head: [u8; 48], data: &[u8]) {
        head[5..8].copy_from_slice(&(data.len() as u32).to_be_bytes()[1..]);
        head[16..20].copy_from_slice(&self.itt.to_be_bytes());
        head[28..32].copy_from_slice(&self.stat_sn.wrapping_add(1).to_be_bytes());
        // Commands are numbered as they are tagged; the login is immediate and takes no number.
        self.itt += u32::from(head[0] == 0x01);
        let padding = vec![0; data.len().next_multiple_of(4) - data.len()];
        self.socket.write_all(&[&head, data, &padding].concat()).unwrap();
    }

    fn receive(&mut self) -> ([u8; 48], Vec<u8>) {
        let mut head = [0; 48];
        self.socket.read_exact(&mut head).unwrap();
        let len = u32::from_be_bytes([0, head[5], head[6], head[7]]) as usize;
        let mut data = vec![0; len.next_multiple_of(4)];
        self.socket.read_exact(&mut data).unwrap();
        data.truncate(len);
        self.stat_sn = u32::from_be_bytes(head[24..28].try_into().unwrap());
        (head, data)
    }
}

pub(crate) const GOOD: u8 = 0x00;
pub(crate) const CHECK_CONDITION: u8 = 0x02;
pub(crate) const RESERVATION_CONFLICT: u8 = 0x18;
pub(crate) const TASK_ABORTED: u8 = 0x40;
