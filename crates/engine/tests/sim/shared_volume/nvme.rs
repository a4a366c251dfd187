//! A hand-written NVMe/TCP host.

use super::client::{Link, Reply, Request, key_of};
use super::wire::Wire;
use blockmux_engine::net::socket::Address;
use blockmux_engine::sim::{BLOCK, SimCore};
use std::collections::HashMap;
use std::io;
use std::rc::Rc;

/// A controller with an admin queue and one I/O queue.
pub(super) struct NvmeLink {
    core: Rc<SimCore>,
    address: Address,
    client: usize,
    admin: Wire,
    io: Option<Wire>,
    cntlid: u16,
    is_ready: bool,
    /// Data of reads that have no completion yet.
    data: HashMap<u16, Vec<u8>>,
    /// Statuses of Compare commands whose fused Write has no completion yet.
    compared: HashMap<u16, u16>,
}

/// A command: opcode, flags, CID, NSID, and the dwords from CDW10 on.
fn sqe(opcode: u8, fuse: u8, cid: u16, cdws: &[u32]) -> [u8; 64] {
    let mut sqe = [0; 64];
    (sqe[0], sqe[1], sqe[4]) = (opcode, 0x40 | fuse, 1);
    sqe[2..4].copy_from_slice(&cid.to_le_bytes());
    for (nth, cdw) in cdws.iter().enumerate() {
        sqe[40 + 4 * nth..][..4].copy_from_slice(&cdw.to_le_bytes());
    }
    sqe
}

/// A capsule with its data, or whose data the transport transfers to the host.
fn capsule(mut sqe: [u8; 64], data: &[u8], data_in: usize) -> Vec<u8> {
    let (len, kind) = if data_in > 0 { (data_in, 0x5a) } else { (data.len(), 0x01) };
    sqe[32..36].copy_from_slice(&(len as u32).to_le_bytes());
    sqe[39] = kind;
    let total = 72 + data.len() as u32;
    let pdo = if data.is_empty() { 0 } else { 72 };
    [&[4, 0, 72, pdo], &total.to_le_bytes()[..], &sqe, data].concat()
}

/// ICReq, then Connect.
fn open(wire: &mut Wire, client: usize, qid: u16, cntlid: u16) {
    let mut request = [0; 128];
    (request[2], request[4]) = (128, 128);
    wire.send(&request);
    let mut data = [0; 1024];
    data[..16].fill(client as u8 + 1);
    data[16..18].copy_from_slice(&cntlid.to_le_bytes());
    for (at, nqn) in [(256, "nqn.2026-11.test:disk".to_owned()), (512, format!("nqn.2026-11.test:{client}"))]
    {
        data[at..][..nqn.len()].copy_from_slice(nqn.as_bytes());
    }
    let mut connect = sqe(0x7f, 0, 0, &[u32::from(qid) << 16, 31]);
    connect[4] = 1;
    wire.send(&capsule(connect, &data, 0));
}

impl NvmeLink {
    /// Reads what arrived on the admin queue: first Connect completes, then Property Set of CC.
    fn poll_admin(&mut self) -> io::Result<()> {
        while let Some(pdu) = self.admin.take(8, plen) {
            match (pdu[0], u16::from_le_bytes([pdu[22], pdu[23]])) {
                (1, _) => {}
                (5, 0) if self.cntlid == NO_CONTROLLER => {
                    self.cntlid = u16::from_le_bytes([pdu[8], pdu[9]]);
                    let mut set = sqe(0x7f, 0, 1, &[0, 0x14, 0x46_0001]);
                    set[4] = 0;
                    self.admin.send(&capsule(set, &[], 0));
                }
                (5, 0) => {
                    let mut wire = Wire::connect(&self.core, &self.address)?;
                    open(&mut wire, self.client, 1, self.cntlid);
                    self.io = Some(wire);
                }
                other => return Err(io::Error::other(format!("on the admin queue: {other:?}"))),
            }
        }
        Ok(())
    }

    fn on_completion(&mut self, cid: u16, status: u16) -> Option<(u16, Reply)> {
        if cid & COMPARE != 0 {
            self.compared.insert(cid & !COMPARE, status);
            return None;
        }
        let data = self.data.remove(&cid).unwrap_or_default();
        let status = match self.compared.remove(&cid) {
            Some(first) if first != 0 => first,
            _ => status,
        };
        // Without DNR and More.
        let reply = match status >> 1 & 0x7ff {
            0 => Reply::Good(data),
            0x83 => Reply::Conflict,
            0x285 => Reply::Miscompare,
            _ => Reply::Unknown,
        };
        Some((cid, reply))
    }
}

impl Link for NvmeLink {
    fn connect(core: &Rc<SimCore>, address: &Address, client: usize) -> io::Result<NvmeLink> {
        let mut admin = Wire::connect(core, address)?;
        open(&mut admin, client, 0, NO_CONTROLLER);
        Ok(NvmeLink {
            core: core.clone(),
            address: address.clone(),
            client,
            admin,
            io: None,
            cntlid: NO_CONTROLLER,
            is_ready: false,
            data: HashMap::new(),
            compared: HashMap::new(),
        })
    }

    fn drains(aborts: bool) -> bool {
        aborts
    }

    fn is_ready(&self) -> bool {
        self.is_ready
    }

    fn send(&mut self, tag: u16, request: &Request) {
        let keys = |first: u64, second: u64| [first.to_le_bytes(), second.to_le_bytes()].concat();
        let own_key = key_of(self.client);
        let acquire = |action: u32| sqe(0x11, 0, tag, &[WRITE_EXCLUSIVE_ALL_REGISTRANTS << 8 | action]);
        let bytes = match request {
            Request::Read { block } => capsule(sqe(0x02, 0, tag, &[*block as u32]), &[], BLOCK),
            Request::Write { block, data } => capsule(sqe(0x01, 0, tag, &[*block as u32]), data, 0),
            Request::CompareAndWrite { block, expected, data } => {
                let compare = capsule(sqe(0x05, 1, tag | COMPARE, &[*block as u32]), expected, 0);
                [compare, capsule(sqe(0x01, 2, tag, &[*block as u32]), data, 0)].concat()
            }
            Request::Register => capsule(sqe(0x0d, 0, tag, &[IGNORE_EXISTING_KEY]), &keys(0, own_key), 0),
            Request::Reserve => capsule(acquire(0), &keys(own_key, 0), 0),
            Request::Preempt { victim, aborts } => {
                capsule(acquire(1 + u32::from(*aborts)), &keys(own_key, key_of(*victim)), 0)
            }
        };
        self.io.iter_mut().for_each(|io| io.send(&bytes));
    }

    fn poll(&mut self) -> io::Result<Vec<(u16, Reply)>> {
        self.admin.turn()?;
        if self.io.is_none() {
            self.poll_admin()?;
        }
        let mut replies = Vec::new();
        let Some(mut io) = self.io.take() else { return Ok(replies) };
        io.turn()?;
        while let Some(pdu) = io.take(8, plen) {
            let cid = |at: usize| u16::from_le_bytes([pdu[at], pdu[at + 1]]);
            match pdu[0] {
                1 => {}
                5 if !self.is_ready && cid(22) == 0 => self.is_ready = true,
                5 if self.is_ready => replies.extend(self.on_completion(cid(20), cid(22))),
                // C2HData, after which there may be no capsule.
                7 => {
                    self.data.insert(cid(8), pdu[24..].to_vec());
                    if pdu[1] & 8 != 0 {
                        replies.extend(self.on_completion(cid(8), 0));
                    }
                }
                other => return Err(io::Error::other(format!("PDU {other:#x} on the I/O queue"))),
            }
        }
        self.io = Some(io);
        Ok(replies)
    }

    fn close(&mut self) {
        self.admin.close();
        self.io.iter().for_each(Wire::close);
    }
}

fn plen(header: &[u8]) -> usize {
    u32::from_le_bytes([header[4], header[5], header[6], header[7]]) as usize
}

/// In a CID: the Compare of the Write with this tag.
const COMPARE: u16 = 0x8000;
const NO_CONTROLLER: u16 = 0xffff;
/// IEKEY of Reservation Register.
const IGNORE_EXISTING_KEY: u32 = 1 << 3;
const WRITE_EXCLUSIVE_ALL_REGISTRANTS: u32 = 5;
