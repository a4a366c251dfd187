//! A minimal NVMe/TCP host, for behaviour that no other host shows.

use std::io::{Read, Write};
use std::net::TcpStream;

/// One queue of a controller.
pub(crate) struct RawNvme {
    socket: TcpStream,
    place: Place,
    host: String,
    cid: u16,
    /// Identifier of the queue's controller.
    cntlid: u16,
}

/// Address and name of a subsystem.
#[derive(Clone)]
struct Place {
    address: String,
    nqn: String,
}

/// A controller's answer to a command: a completion with a status, or an R2T with a transfer tag.
enum Said {
    Done(u16),
    Ready(u16),
}

impl RawNvme {
    /// The admin queue of a new controller at `nvme+tcp://HOST:PORT/NQN/NSID`, or the status that
    /// it is refused with.
    pub(crate) fn admin(url: &str, host: &str) -> Result<RawNvme, u16> {
        let mut parts = url.split('/').skip(2).map(str::to_owned);
        let (address, nqn) = (parts.next().unwrap(), parts.next().unwrap());
        RawNvme::connect(Place { address, nqn }, host, 0, 0xffff)
    }

    /// An enabled controller's first I/O queue, together with its admin queue.
    pub(crate) fn controller(url: &str, host: &str) -> [RawNvme; 2] {
        let admin = RawNvme::enabled(url, host).unwrap();
        let queue = RawNvme::connect(admin.place.clone(), host, 1, admin.cntlid).unwrap();
        [admin, queue]
    }

    /// The admin queue of an enabled controller, or the status that it is refused with.
    pub(crate) fn enabled(url: &str, host: &str) -> Result<RawNvme, u16> {
        let mut admin = RawNvme::admin(url, host)?;
        // Property Set of CC: EN, and entries of 64 and 16 bytes.
        let mut enable = admin.sqe(0x7f, 0);
        enable[44] = 0x14;
        enable[48..52].copy_from_slice(&0x46_0001_u32.to_le_bytes());
        admin.capsule(&enable, &[]);
        assert_eq!(admin.status(), Some(0));
        Ok(admin)
    }

    /// Executes an admin command that returns up to 4 KiB; returns the data, or its status.
    pub(crate) fn admin_read(&mut self, opcode: u8, nsid: u32, cdw10: u32) -> Result<Vec<u8>, u16> {
        let mut sqe = self.sqe(opcode, 0);
        sqe[4..8].copy_from_slice(&nsid.to_le_bytes());
        sqe[24..40].copy_from_slice(&sgl(4096, 0x5a));
        sqe[40..44].copy_from_slice(&cdw10.to_le_bytes());
        self.capsule(&sqe, &[]);
        let mut data = Vec::new();
        loop {
            let pdu = self.pdu();
            match (pdu[0], pdu[1] & 8) {
                (5, _) if status(&pdu) == 0 => return Ok(data),
                (5, _) => return Err(status(&pdu)),
                // C2HData, with the flag that makes a response needless.
                (7, success) => {
                    data.extend(&pdu[usize::from(pdu[3])..]);
                    if success != 0 {
                        return Ok(data);
                    }
                }
                (other, _) => panic!("a PDU of type {other}: {pdu:?}"),
            }
        }
    }

    /// The identifier of the queue's controller.
    pub(crate) fn cntlid(&self) -> u16 {
        self.cntlid
    }

    /// A connection of the same host without a queue.
    pub(crate) fn unconnected(&self) -> RawNvme {
        RawNvme::open(self.place.clone(), &self.host)
    }

    fn connect(place: Place, host: &str, qid: u16, cntlid: u16) -> Result<RawNvme, u16> {
        let mut queue = RawNvme::open(place, host);
        queue.become_queue(qid, cntlid).map(|()| queue)
    }

    fn open(place: Place, host: &str) -> RawNvme {
        let mut socket = TcpStream::connect(&place.address).unwrap();
        // ICReq, without digests.
        let mut request = [0; 128];
        (request[2], request[4]) = (128, 128);
        socket.write_all(&request).unwrap();
        socket.read_exact(&mut request).unwrap();
        assert_eq!(request[0], 1, "ICResp");
        RawNvme { socket, place, host: host.to_owned(), cid: 0, cntlid: 0 }
    }

    /// Sends Connect; returns the status if it is refused, after which another may follow.
    pub(crate) fn become_queue(&mut self, qid: u16, cntlid: u16) -> Result<(), u16> {
        let mut connect = self.sqe(0x7f, 1);
        connect[24..40].copy_from_slice(&sgl(1024, 1));
        connect[42..44].copy_from_slice(&qid.to_le_bytes());
        connect[44..46].copy_from_slice(&(ENTRIES - 1).to_le_bytes());
        let mut data = [0; 1024];
        // The host identifier is derived from the name.
        data[..16].copy_from_slice(&self.host.as_bytes()[self.host.len() - 16..]);
        data[16..18].copy_from_slice(&cntlid.to_le_bytes());
        data[256..256 + self.place.nqn.len()].copy_from_slice(self.place.nqn.as_bytes());
        data[512..512 + self.host.len()].copy_from_slice(self.host.as_bytes());
        self.capsule(&connect, &data);
        let head = self.pdu();
        assert_eq!(head[0], 5, "a response capsule");
        match status(&head) {
            0 => {
                self.cntlid = u16::from_le_bytes([head[8], head[9]]);
                Ok(())
            }
            refused => Err(refused),
        }
    }

    /// Starts a write. Data that does not fit into the capsule is sent after an R2T.
    pub(crate) fn begin_write(&mut self, offset: u64, len: usize, data: &[u8], is_fua: bool) {
        let mut write = self.sqe(1, 1);
        write[4] = 1;
        write[24..40].copy_from_slice(&sgl(len, if data.is_empty() { 0x5a } else { 1 }));
        write[40..48].copy_from_slice(&(offset / 512).to_le_bytes());
        write[48..50].copy_from_slice(&((len / 512 - 1) as u16).to_le_bytes());
        write[51] = if is_fua { 0x40 } else { 0 };
        self.capsule(&write, data);
    }

    /// Writes, and returns the status.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8], is_fua: bool) -> u16 {
        let in_capsule = if data.len() <= 8192 { data } else { &[] };
        self.begin_write(offset, data.len(), in_capsule, is_fua);
        let mut said = self.said();
        if let Said::Ready(ttag) = said {
            let mut head = [0; 24];
            (head[0], head[1], head[2], head[3]) = (6, 4, 24, 24);
            head[4..8].copy_from_slice(&(24 + data.len() as u32).to_le_bytes());
            head[8..10].copy_from_slice(&self.cid.to_le_bytes());
            head[10..12].copy_from_slice(&ttag.to_le_bytes());
            head[16..20].copy_from_slice(&(data.len() as u32).to_le_bytes());
            self.socket.write_all(&[&head, data].concat()).unwrap();
            said = self.said();
        }
        match said {
            Said::Done(status) => status,
            Said::Ready(_) => panic!("the controller sent a second R2T"),
        }
    }

    /// The next PDU of the controller.
    fn said(&mut self) -> Said {
        let pdu = self.pdu();
        match pdu[0] {
            5 => Said::Done(status(&pdu)),
            9 => Said::Ready(u16::from_le_bytes([pdu[10], pdu[11]])),
            other => panic!("a PDU of type {other}: {pdu:?}"),
        }
    }

    /// The status of the next response; `None` if the controller is gone.
    pub(crate) fn status(&mut self) -> Option<u16> {
        let mut answer = [0; 24];
        self.socket.read_exact(&mut answer).ok()?;
        assert_eq!(answer[0], 5, "a response capsule");
        Some(status(&answer))
    }

    fn sqe(&mut self, opcode: u8, fctype: u8) -> [u8; 64] {
        self.cid = (self.cid + 1) % 1024;
        let mut sqe = [0; 64];
        (sqe[0], sqe[1], sqe[4]) = (opcode, 0x40, fctype);
        sqe[2..4].copy_from_slice(&self.cid.to_le_bytes());
        sqe
    }

    fn capsule(&mut self, sqe: &[u8; 64], data: &[u8]) {
        let mut head = [4, 0, 72, if data.is_empty() { 0 } else { 72 }, 0, 0, 0, 0];
        head[4..8].copy_from_slice(&(72 + data.len() as u32).to_le_bytes());
        // A missing response shows that the controller is gone.
        let _ = self.socket.write_all(&[&head, &sqe[..], data].concat());
    }

    fn pdu(&mut self) -> Vec<u8> {
        let mut pdu = vec![0; 8];
        self.socket.read_exact(&mut pdu).unwrap();
        let len = u32::from_le_bytes(pdu[4..8].try_into().unwrap()) as usize;
        pdu.resize(len, 0);
        self.socket.read_exact(&mut pdu[8..]).unwrap();
        pdu
    }
}

/// Status type and code of a response capsule.
fn status(pdu: &[u8]) -> u16 {
    (u16::from_le_bytes([pdu[22], pdu[23]]) >> 1) & 0x7ff
}

fn sgl(len: usize, kind: u8) -> [u8; 16] {
    let mut sgl = [0; 16];
    sgl[8..12].copy_from_slice(&(len as u32).to_le_bytes());
    sgl[15] = kind;
    sgl
}

/// Number of entries of a queue.
pub(crate) const ENTRIES: u16 = 128;
