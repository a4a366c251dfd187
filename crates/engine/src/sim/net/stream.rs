//! Data transfer over a simulated stream, including kTLS.

use super::{SimStream, SimTls, SimWatch, StreamSegment, SystemTls};
use crate::net::host::{ByteStream, StreamEnd};
use crate::net::ktls::Direction;
use crate::sim::conditions::MAX_STALL;
use blockmux_proto::driver::outbox::{Outbox, OutboxPiece};
use blockmux_tls::{APPLICATION_DATA, OVERHEAD, RecordKeys};
use blockmux_volume::{Chunk, SgList};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

impl SimStream {
    /// Passes up to `most` bytes that can be received to `put`; 0 at the end of the stream.
    fn take(&self, most: usize, put: impl FnMut(&[u8])) -> io::Result<usize> {
        let mut tls = self.tls.borrow_mut();
        match tls.as_mut().filter(|tls| tls.receives()) {
            None => self.take_arrived(most, put),
            Some(tls) => {
                let arrived = self.take_arrived(usize::MAX, |bytes| tls.take(bytes));
                match (tls.data(most, put)?, arrived) {
                    (Some(given), _) => Ok(given),
                    (None, Ok(1..)) => Err(io::ErrorKind::WouldBlock.into()),
                    (None, arrived) => arrived,
                }
            }
        }
    }

    /// Takes up to `most` bytes that have arrived, split at random.
    fn take_arrived(&self, most: usize, mut put: impl FnMut(&[u8])) -> io::Result<usize> {
        let now = self.net.now();
        let mut pipe = self.incoming().borrow_mut();
        let asked = self.net.transfer_len(most.min(pipe.arrived(now)));
        if asked == 0 {
            return match pipe.ends_at {
                _ if self.wire.is_broken.get() => Err(io::ErrorKind::ConnectionReset.into()),
                Some(end) if end <= now && pipe.len == 0 => Ok(0),
                _ => Err(io::ErrorKind::WouldBlock.into()),
            };
        }
        let mut left = asked;
        while left > 0
            && let Some(segment) = pipe.segments.front_mut()
        {
            let part_len = left.min(segment.bytes.len());
            put(&segment.bytes.drain(..part_len).collect::<Vec<u8>>());
            left -= part_len;
            if segment.bytes.is_empty() {
                pipe.segments.pop_front();
            }
        }
        pipe.len -= asked;
        if let Some(writer) = pipe.writer.take() {
            // The sender learns of the new room after a delay.
            let delay = self.net.up_to(self.net.0.conditions.delay);
            self.net.wake_at(now + delay, &writer);
        }
        Ok(asked)
    }

    /// Number of bytes that can be sent now.
    fn room(&self) -> io::Result<usize> {
        let pipe = self.outgoing().borrow();
        if self.wire.is_broken.get() || pipe.is_reader_gone {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        Ok(self.net.0.conditions.window.saturating_sub(pipe.len))
    }

    /// Sends these bytes.
    fn carry(&self, bytes: VecDeque<u8>) {
        let (conditions, now, fits) = (self.net.0.conditions, self.net.now(), bytes.len());
        let mut pipe = self.outgoing().borrow_mut();
        let mut arrives = now + self.net.up_to(conditions.delay);
        if self.net.below(1000) < conditions.stalls_per_thousand.into() {
            arrives += self.net.up_to(MAX_STALL);
        }
        let wire_time = conditions.bytes_per_s.map_or(0, |rate| fits as u64 * 1_000_000_000 / rate);
        arrives = arrives.max(pipe.last_arrival) + Duration::from_nanos(wire_time);
        pipe.last_arrival = arrives;
        pipe.len += fits;
        pipe.segments.push_back(StreamSegment { arrives, bytes });
        if let Some(reader) = pipe.reader.take() {
            self.net.wake_at(arrives, &reader);
        }
        drop(pipe);
        let life = self.wire.life.get().saturating_sub(fits as u64);
        self.wire.life.set(life);
        if life == 0 {
            self.net.0.breaks.set(self.net.0.breaks.get() + 1);
            self.break_off();
        }
    }
}

impl ByteStream for SimStream {
    type Watch = SimWatch;

    fn share(&self) -> SimStream {
        SimStream {
            net: self.net.clone(),
            wire: self.wire.clone(),
            side: self.side,
            peer: self.peer.clone(),
            owners: self.owners.clone(),
            is_closed: self.is_closed.clone(),
            tls: self.tls.clone(),
        }
    }

    /// Closes the stream as TCP does: by FIN, or by RST if input was left unread.
    fn close(&self) {
        if self.is_closed.replace(true) {
            return;
        }
        let now = self.net.now();
        let left_unread = {
            let mut incoming = self.incoming().borrow_mut();
            incoming.is_reader_gone = true;
            for waker in [incoming.writer.take(), incoming.watcher.take()].into_iter().flatten() {
                waker.wake();
            }
            incoming.arrived(now) > 0
        };
        if left_unread {
            return self.break_off();
        }
        let mut outgoing = self.outgoing().borrow_mut();
        let ends_at = outgoing.last_arrival.max(now + self.net.up_to(self.net.0.conditions.delay));
        outgoing.ends_at = Some(ends_at);
        for waker in [outgoing.reader.take(), outgoing.watcher.take()].into_iter().flatten() {
            self.net.wake_at(ends_at, &waker);
        }
    }

    fn peer(&self) -> &str {
        &self.peer
    }

    fn shared_peer(&self) -> Arc<str> {
        self.peer.clone()
    }

    fn connect_result(&self) -> Option<io::Result<()>> {
        match self.net.now() < self.wire.opens_at {
            true => None,
            false if self.wire.is_refused => Some(Err(io::ErrorKind::ConnectionRefused.into())),
            false => Some(Ok(())),
        }
    }

    fn receive(&mut self, chunk: &mut Chunk, most: usize) -> io::Result<usize> {
        self.take(chunk.room().min(most), |bytes| chunk.extend(bytes))
    }

    fn waiting(&self) -> usize {
        self.incoming().borrow().arrived(self.net.now())
    }

    fn unacknowledged(&self) -> usize {
        self.outgoing().borrow().len
    }

    fn receive_placed(&mut self, list: &SgList, at: usize, chunk: &mut Chunk) -> io::Result<usize> {
        let mut filled = at;
        self.take(list.len() - at + chunk.room(), |bytes| {
            let (placed, rest) = bytes.split_at(bytes.len().min(list.len() - filled));
            list.slice(filled, placed.len()).copy_from(placed);
            filled += placed.len();
            chunk.extend(rest);
        })
    }

    fn send(&mut self, outbox: &mut Outbox) -> io::Result<usize> {
        let mut tls = self.tls.borrow_mut();
        let mut tls = tls.as_mut().filter(|tls| tls.sends());
        let room = self.room()?;
        let most = match &tls {
            None => outbox.len().min(room),
            Some(_) => SimTls::fits(outbox.len(), room),
        };
        let fits = self.net.transfer_len(most);
        if fits == 0 {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let conditions = self.net.0.conditions;
        let mut bytes = VecDeque::with_capacity(fits);
        let mut may_damage = conditions.damaged_per_thousand > 0
            && self.net.below(1000) < conditions.damaged_per_thousand.into();
        for piece in outbox.pieces() {
            let left = fits - bytes.len();
            match piece {
                OutboxPiece::Head(head) => bytes.extend(&head[..left.min(head.len())]),
                OutboxPiece::Payload(seg) => {
                    let mut payload = seg.slice(0, left.min(seg.len())).to_vec();
                    if let Some(first) = payload.first_mut().filter(|_| std::mem::take(&mut may_damage)) {
                        *first ^= 0x40;
                    }
                    bytes.extend(payload);
                }
            }
        }
        outbox.consume(fits);
        self.carry(match &mut tls {
            None => bytes,
            Some(tls) => tls.seal(APPLICATION_DATA, bytes.make_contiguous()),
        });
        Ok(fits)
    }

    fn attach_tls(&mut self) -> io::Result<()> {
        let attached = SimTls::attach(self.net.0.system_tls.get())?;
        *self.tls.borrow_mut() = Some(attached);
        Ok(())
    }

    fn set_tls_keys(&mut self, direction: Direction, keys: &RecordKeys) -> io::Result<()> {
        let mut tls = self.tls.borrow_mut();
        tls.as_mut().ok_or(io::ErrorKind::Unsupported)?.set_keys(direction, keys)?;
        self.net.0.tls_keys.set(self.net.tls_keys() + 1);
        Ok(())
    }

    fn suspend_tls(&self) {
        self.net.set_system_tls(SystemTls::None);
    }

    fn send_record(&mut self, content_type: u8, bytes: &[u8]) -> io::Result<()> {
        let mut tls = self.tls.borrow_mut();
        let tls = tls.as_mut().filter(|tls| tls.sends()).ok_or(io::ErrorKind::Unsupported)?;
        if self.room()? < bytes.len() + OVERHEAD {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.carry(tls.seal(content_type, bytes));
        Ok(())
    }

    fn receive_record(&mut self, bytes: &mut [u8]) -> io::Result<(u8, usize)> {
        let mut tls = self.tls.borrow_mut();
        let tls = tls.as_mut().filter(|tls| tls.receives()).ok_or(io::ErrorKind::Unsupported)?;
        tls.record(bytes)?.ok_or_else(|| io::ErrorKind::WouldBlock.into())
    }

    fn wake_when_readable(&self, watch: &SimWatch) {
        if self.tls.borrow().as_ref().is_some_and(SimTls::has_more) {
            return watch.0.wake();
        }
        let mut pipe = self.incoming().borrow_mut();
        match pipe.next_arrival() {
            _ if self.wire.is_broken.get() => watch.0.wake(),
            Some(when) => self.net.wake_at(when, &watch.0),
            None => pipe.reader = Some(watch.0.clone()),
        }
    }

    fn wake_when_writable(&self, watch: &SimWatch) {
        let mut pipe = self.outgoing().borrow_mut();
        // A short record must fit.
        let least = if self.tls.borrow().as_ref().is_some_and(SimTls::sends) { OVERHEAD + 16 } else { 0 };
        let has_room = pipe.len + least < self.net.0.conditions.window;
        if self.net.now() < self.wire.opens_at {
            self.net.wake_at(self.wire.opens_at, &watch.0);
        } else if has_room || self.wire.is_broken.get() || pipe.is_reader_gone {
            watch.0.wake();
        } else {
            pipe.writer = Some(watch.0.clone());
        }
    }

    fn ended(&self) -> StreamEnd {
        let input_ends = self.incoming().borrow().ends_at;
        match input_ends {
            _ if self.wire.is_broken.get() || self.is_closed.get() => StreamEnd::Both,
            Some(end) if end <= self.net.now() => StreamEnd::Input,
            _ => StreamEnd::Not,
        }
    }

    fn wake_when_ended(&self, so_far: StreamEnd, watch: &SimWatch) {
        if self.ended() == StreamEnd::Both {
            return watch.0.wake();
        }
        let mut pipe = self.incoming().borrow_mut();
        match pipe.ends_at.filter(|_| so_far == StreamEnd::Not) {
            Some(end) => self.net.wake_at(end, &watch.0),
            None => pipe.watcher = Some(watch.0.clone()),
        }
    }
}
