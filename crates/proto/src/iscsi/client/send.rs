//! What a session sends: commands and their data, pings and answers to pings, the logout.

use super::config::BurstSize;
use super::full::{FullFeature, Progress};
use super::immediate::{Numbers, PING_TAG};
use super::lane::Lane;
use crate::scsi::initiator::{Request, Transfer};
use crate::slots::Key;
use blockmux_volume::SgList;
use blockmux_wire::iscsi::scsi::{ATTR_SIMPLE, DataOut, FLAG_READ, FLAG_WRITE, ScsiCommand};
use blockmux_wire::iscsi::session::NopIn;
use blockmux_wire::iscsi::{Bhs, FLAG_FINAL, Opcode, RESERVED_TAG, U24};
use zerocopy::transmute_ref;

/// Consecutive commands that go on one connection. To send each on another one would be fairer, and six times slower at
/// 4 KiB: the target may not begin a command before those with smaller numbers, so that it would have to go from one
/// connection to the next for each. For the same reason, and because both sides have to look at each connection that is
/// used, there is no use for another one before this one has a whole burst under way.
#[derive(Clone, Copy)]
pub(super) struct Burst {
    /// Where they go.
    lane: usize,
    /// How many have gone, and with how many bytes.
    commands: u32,
    bytes: u32,
    size: BurstSize,
}

impl Burst {
    /// The first.
    pub(super) fn first(size: BurstSize) -> Burst {
        Burst { lane: 0, commands: 0, bytes: 0, size }
    }

    /// As it is with the next command. When a burst is over and nothing of it was answered, that goes on the connection
    /// that has the least to do.
    #[inline]
    fn next(self, lanes: &[Lane]) -> Option<Burst> {
        let takes = |lane: &Lane| lane.is_open() && lane.has_credit();
        let is_over = self.commands >= self.size.commands || self.bytes >= self.size.bytes;
        match lanes.get(self.lane).filter(|lane| takes(lane)).map(|lane| lane.in_flight) {
            Some(in_flight) if !is_over && in_flight > 0 => Some(self),
            Some(in_flight) if !is_over || in_flight < self.commands => Some(self.on(self.lane)),
            _ => {
                let open = lanes.iter().enumerate().filter(|(_, lane)| takes(lane));
                open.min_by_key(|(_, lane)| lane.in_flight).map(|(lane, _)| self.on(lane))
            }
        }
    }

    /// The next one.
    #[inline]
    fn on(self, lane: usize) -> Burst {
        Burst { lane, ..Burst::first(self.size) }
    }

    /// The connection of the last command.
    #[inline]
    pub(super) fn latest(&self) -> usize {
        self.lane
    }

    #[inline]
    fn count(&mut self, transfer: &Transfer) {
        let len = match *transfer {
            Transfer::Nothing => 0,
            Transfer::In(len) | Transfer::Out(len) => len,
        };
        self.commands = self.commands.saturating_add(1);
        self.bytes = self.bytes.saturating_add(len);
    }
}

impl FullFeature {
    /// Sends commands as long as there are some and the window is open. They all are numbered in one sequence, by which the
    /// target puts them in order again (RFC 7143 §4.2.2.1).
    #[inline]
    pub(super) fn send_commands(&mut self, lanes: &mut [Lane]) {
        while self.may_send()
            && !self.aborts.holds_commands()
            && self.window() > 0
            && let Some(burst) = self.burst.next(lanes)
            && let Some(lane) = lanes.get_mut(burst.lane)
            && let Some(request) = self.queue.next()
        {
            self.burst = burst;
            let cmd_sn = self.cmd_sn;
            self.cmd_sn = cmd_sn.wrapping_add(1);
            lane.in_flight = lane.in_flight.saturating_add(1);
            self.burst.count(&request.transfer);
            self.send_command(lane, &request, cmd_sn);
        }
    }

    /// Sends a command once more, as if for the first time, but with the number that it has (RFC 7143 §7.2.1).
    pub(super) fn send_again(&mut self, lane: &mut Lane, key: Key) {
        let Some(request) = self.queue.request(key) else { return };
        let Some((progress, _)) = self.queue.transport(key) else { return };
        let cmd_sn = progress.cmd_sn;
        *progress = Progress::default();
        self.send_command(lane, &request, cmd_sn);
    }

    /// Sends a command with the data that may go with it unasked (RFC 7143, data transfer overview).
    #[inline]
    fn send_command(&mut self, lane: &mut Lane, request: &Request, cmd_sn: u32) {
        let (mut flags, mut expected, mut immediate, mut unsolicited) = (FLAG_FINAL | ATTR_SIMPLE, 0, 0, 0);
        match request.transfer {
            Transfer::Nothing => {}
            Transfer::In(len) => {
                flags |= FLAG_READ;
                expected = len;
            }
            Transfer::Out(len) => {
                flags |= FLAG_WRITE;
                expected = len;
                let first = len.min(self.terms.first_burst);
                if self.terms.immediate_data {
                    immediate = first.min(lane.terms.max_send_segment);
                }
                if lane.mover.is_some() {
                    // All at once or nothing: what is left is one read of the target's, with a part or without.
                    immediate = if immediate == len { len } else { 0 };
                    unsolicited = immediate;
                } else {
                    unsolicited = if self.terms.initial_r2t { immediate } else { first };
                }
                if unsolicited > immediate {
                    flags &= !FLAG_FINAL;
                }
            }
        }
        if let Some((progress, _)) = self.queue.transport(request.key) {
            (progress.lane, progress.cmd_sn, progress.next) = (lane.cid, cmd_sn, unsolicited);
        }
        let tag = request.key.short();
        let command = ScsiCommand {
            opcode: Opcode::SCSI_COMMAND.0,
            flags,
            reserved: 0,
            priority: 0,
            total_ahs_length: 0,
            data_segment_length: U24::new(immediate),
            lun: self.lun.0.to_be_bytes(),
            initiator_task_tag: tag.into(),
            expected_data_transfer_length: expected.into(),
            cmd_sn: cmd_sn.into(),
            exp_stat_sn: lane.statuses.expected().into(),
            cdb: request.cdb,
        };
        if lane.mover.is_some() {
            return self.send_over_rdma(lane, request, command, immediate);
        }
        if immediate > 0 {
            self.send_data(lane, request.key, transmute_ref!(&command), 0, immediate);
        } else {
            lane.sender.push(transmute_ref!(&command), &[]);
        }
        if unsolicited > immediate {
            self.send_sequence(lane, request.key, RESERVED_TAG, immediate, unsolicited);
        }
    }

    /// Sends the data-out from `from` up to `end` as one sequence of Data-Out PDUs.
    #[inline]
    pub(super) fn send_sequence(
        &mut self,
        lane: &mut Lane,
        key: Key,
        target_transfer_tag: u32,
        from: u32,
        end: u32,
    ) {
        let (mut at, mut data_sn) = (from, 0_u32);
        while at < end {
            let len = end.saturating_sub(at).min(lane.terms.max_send_segment);
            let next = at.saturating_add(len);
            let data_out = DataOut {
                opcode: Opcode::DATA_OUT.0,
                flags: if next == end { FLAG_FINAL } else { 0 },
                reserved: [0; 2],
                total_ahs_length: 0,
                data_segment_length: U24::new(len),
                lun: self.lun.0.to_be_bytes(),
                initiator_task_tag: key.short().into(),
                target_transfer_tag: target_transfer_tag.into(),
                reserved_cmd_sn: [0; 4],
                exp_stat_sn: lane.statuses.expected().into(),
                reserved_end: [0; 4],
                data_sn: data_sn.into(),
                buffer_offset: at.into(),
                reserved_last: [0; 4],
            };
            self.send_data(lane, key, transmute_ref!(&data_out), at, len);
            (at, data_sn) = (next, data_sn.wrapping_add(1));
        }
    }

    /// A header with a part of a command's data-out, by reference.
    #[inline]
    fn send_data(&mut self, lane: &mut Lane, key: Key, header: &Bhs, from: u32, len: u32) {
        let nothing = SgList::default();
        let (data, base) = self.queue.data_out(key).unwrap_or((&nothing, 0));
        let range = (base.saturating_add(from as usize), len as usize);
        lane.sender.push_lent(&self.pool, header, data, range);
    }

    /// Asks a silent target whether it is there.
    pub(super) fn send_ping(&self, lane: &mut Lane) {
        let nop = self.numbers(lane).nop_out(PING_TAG, RESERVED_TAG, self.lun.0.to_be_bytes());
        lane.sender.push(transmute_ref!(&nop), &[]);
    }

    /// Answers the target's ping; what data it has need not come back.
    pub(super) fn send_pong(&mut self, lane: &mut Lane, ping: &NopIn) {
        if self.may_send() {
            lane.pongs = lane.pongs.saturating_add(1);
            let nop = self.numbers(lane).nop_out(RESERVED_TAG, ping.target_transfer_tag.get(), ping.lun);
            lane.sender.push(transmute_ref!(&nop), &[]);
        }
    }

    /// Ends the session in order, and with it all its connections.
    pub(super) fn send_logout(&self, lane: &mut Lane) {
        let logout = self.numbers(lane).logout();
        lane.sender.push(transmute_ref!(&logout), &[]);
    }

    pub(super) fn numbers(&self, lane: &Lane) -> Numbers {
        Numbers { cmd_sn: self.cmd_sn, exp_stat_sn: lane.statuses.expected() }
    }
}
