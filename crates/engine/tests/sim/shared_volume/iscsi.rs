//! A hand-written iSCSI initiator.

use super::client::{Link, Reply, Request, key_of};
use super::wire::Wire;
use blockmux_engine::net::socket::Address;
use blockmux_engine::sim::{BLOCK, SimCore};
use std::io;
use std::rc::Rc;

/// A session of one connection.
pub(super) struct IscsiLink {
    wire: Wire,
    client: usize,
    is_ready: bool,
    cmd_sn: u32,
}

impl IscsiLink {
    fn send(&mut self, mut header: [u8; HEADER], data: &[u8]) {
        header[4..8].copy_from_slice(&(data.len() as u32).to_be_bytes());
        let mut bytes = [&header[..], data].concat();
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        self.wire.send(&bytes);
    }

    /// PERSISTENT RESERVE OUT of a reservation for all registrants, with the client's key and
    /// another one.
    fn reserve_out(&self, action: u8, other_key: u64) -> (Vec<u8>, Vec<u8>) {
        let cdb = vec![0x5f, action, WRITE_EXCLUSIVE_ALL_REGISTRANTS, 0, 0, 0, 0, 0, 24, 0];
        let own_key = if action == REGISTER_AND_IGNORE { 0 } else { key_of(self.client) };
        (cdb, [own_key.to_be_bytes(), other_key.to_be_bytes(), [0; 8]].concat())
    }
}

impl Link for IscsiLink {
    fn connect(core: &Rc<SimCore>, address: &Address, client: usize) -> io::Result<IscsiLink> {
        let wire = Wire::connect(core, address)?;
        let mut link = IscsiLink { wire, client, is_ready: false, cmd_sn: 1 };
        let text = format!("InitiatorName=iqn.2026-11.i:{client}\0TargetName=iqn.2026-11.t:disk0\0");
        let mut header = [0; HEADER];
        (header[0], header[1]) = (0x43, 0x87);
        header[8..14].copy_from_slice(&[0x80, 0, 0, 0, 0, 1]);
        header[27] = 1;
        link.send(header, text.as_bytes());
        Ok(link)
    }

    fn drains(_aborts: bool) -> bool {
        true
    }

    fn is_ready(&self) -> bool {
        self.is_ready
    }

    fn send(&mut self, tag: u16, request: &Request) {
        let at = |opcode: u8, block: u64| vec![opcode, 0, 0, 0, 0, block as u8, 0, 0, 1, 0];
        let (cdb, data) = match request {
            Request::Read { block } => (at(0x28, *block), Vec::new()),
            Request::Write { block, data } => (at(0x2a, *block), data.clone()),
            Request::CompareAndWrite { block, expected, data } => {
                let block = *block as u8;
                let cdb = vec![0x89, 0, 0, 0, 0, 0, 0, 0, 0, block, 0, 0, 0, 1, 0, 0];
                (cdb, [&expected[..], data].concat())
            }
            Request::Register => self.reserve_out(REGISTER_AND_IGNORE, key_of(self.client)),
            Request::Reserve => self.reserve_out(RESERVE, 0),
            Request::Preempt { victim, aborts } => {
                self.reserve_out(if *aborts { PREEMPT_AND_ABORT } else { PREEMPT }, key_of(*victim))
            }
        };
        let is_read = matches!(request, Request::Read { .. });
        let len = if is_read { BLOCK } else { data.len() };
        let mut header = [0; HEADER];
        (header[0], header[1]) = (0x01, 0x81 | if is_read { 0x40 } else { 0x20 });
        header[16..20].copy_from_slice(&u32::from(tag).to_be_bytes());
        header[20..24].copy_from_slice(&(len as u32).to_be_bytes());
        header[24..28].copy_from_slice(&self.cmd_sn.to_be_bytes());
        header[32..][..cdb.len()].copy_from_slice(&cdb);
        self.cmd_sn += 1;
        IscsiLink::send(self, header, &data);
    }

    fn poll(&mut self) -> io::Result<Vec<(u16, Reply)>> {
        self.wire.turn()?;
        let mut replies = Vec::new();
        let len = |header: &[u8]| {
            let data = u32::from_be_bytes([0, header[5], header[6], header[7]]) as usize;
            HEADER + data.next_multiple_of(4)
        };
        while let Some(pdu) = self.wire.take(HEADER, len) {
            let (header, data) = pdu.split_at(HEADER);
            let tag = u16::from_be_bytes([header[18], header[19]]);
            match header[0] {
                0x23 if header[36] == 0 => self.is_ready = true,
                // SCSI Response.
                0x21 => replies.push((tag, reply(header[3], data))),
                // Data-In with the status.
                0x25 if header[1] & 1 != 0 => replies.push((tag, Reply::Good(data[..BLOCK].to_vec()))),
                other => return Err(io::Error::other(format!("PDU {other:#x}"))),
            }
        }
        Ok(replies)
    }

    fn close(&mut self) {
        self.wire.close();
    }
}

/// The result of a command with this SCSI status and these sense data, after their length.
fn reply(status: u8, sense: &[u8]) -> Reply {
    match (status, sense.get(4)) {
        (0x00, _) => Reply::Good(Vec::new()),
        (0x18, _) => Reply::Conflict,
        (0x02, Some(key)) if key & 0x0f == 0x0e => Reply::Miscompare,
        (0x02, Some(key)) if key & 0x0f == 0x06 => Reply::Refused,
        (0x08 | 0x28, _) => Reply::Refused,
        _ => Reply::Unknown,
    }
}

const HEADER: usize = 48;
const RESERVE: u8 = 1;
const PREEMPT: u8 = 4;
const PREEMPT_AND_ABORT: u8 = 5;
const REGISTER_AND_IGNORE: u8 = 6;
const WRITE_EXCLUSIVE_ALL_REGISTRANTS: u8 = 7;
