//! A channel to an image.

use super::current::{CurrentImage, queue_of};
use super::queue::{MAX_BOUNCE, RbdQueue, is_bounced};
use crate::core::reactor::EngineCore;
use crate::volume::core_queues::ChannelCompletions;
use crate::volume::memory_retry::MemoryRetry;
use blockmux_volume::{Channel, Completion, Core, Io, IoError, Op, SgList, Tag, Waker};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

pub(super) struct RbdChannel {
    image: Arc<CurrentImage>,
    /// [`ImageState::id`](super::state::ImageState::id) of the image that the queue leads to.
    id: u64,
    queue: Rc<RefCell<RbdQueue>>,
    engine: Rc<EngineCore>,
    own: Rc<ChannelCompletions>,
    core: Rc<dyn Core>,
    /// Requests that wait for memory of the pool, first in, first out.
    waiting: VecDeque<Io>,
    retry: MemoryRetry,
}

impl RbdChannel {
    /// Opens a channel of a core.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub(super) fn open(
        image: &Arc<CurrentImage>,
        engine: Rc<EngineCore>,
        core: &Rc<dyn Core>,
        depth: u32,
        waker: Waker,
    ) -> Result<RbdChannel, IoError> {
        let state = image.get();
        let (id, queue) = (state.id, queue_of(&state, &engine)?);
        let (own, retry) = (ChannelCompletions::new(depth, waker), MemoryRetry::new(core));
        let (image, core, waiting) = (image.clone(), core.clone(), VecDeque::new());
        Ok(RbdChannel { image, id, queue, engine, own, core, waiting, retry })
    }

    /// Continues with the image that the volume has now. What was submitted to the one before
    /// completes there.
    #[cold]
    fn change_image(&mut self) -> Result<(), IoError> {
        let state = self.image.get();
        let queue = queue_of(&state, &self.engine)?;
        let before = std::mem::replace(&mut self.queue, queue);
        self.id = state.id;
        before.borrow().on_channel_closed();
        Ok(())
    }

    /// Starts a request; returns it if the pool has no memory for it.
    fn start(&mut self, mut io: Io) -> Result<(), Io> {
        let needed = needed_memory(&io);
        let mut bounce = None;
        if needed > 0 {
            let Some(memory) = self.core.pool().take_payload_or_wait(needed) else { return Err(io) };
            let seg = memory.seg(0, needed);
            if io.op == Op::Read {
                io.data = Some(SgList::one(seg));
            } else {
                bounce = Some(seg);
            }
        }
        self.queue.borrow_mut().submit(io, bounce, &self.own);
        Ok(())
    }

    fn retry_waiting(&mut self) {
        while let Some(io) = self.waiting.pop_front() {
            if let Err(io) = self.start(io) {
                self.waiting.push_front(io);
                break;
            }
        }
        self.retry.arm(!self.waiting.is_empty(), &self.own.waker);
    }

    fn complete(&self, tag: Tag, result: Result<blockmux_volume::Output, IoError>) {
        self.own.done.borrow_mut().push(Completion { tag, result });
    }
}

/// Memory that a request needs besides its own, in bytes.
fn needed_memory(io: &Io) -> usize {
    match (&io.data, io.op) {
        (None, Op::Read) => io.len as usize,
        (Some(data), Op::Write { .. }) if is_bounced(data) => data.len().min(MAX_BOUNCE),
        _ => 0,
    }
}

impl Channel for RbdChannel {
    #[inline]
    fn submit(&mut self, io: Io) {
        if !self.image.is(self.id)
            && let Err(error) = self.change_image()
        {
            return self.complete(io.tag, Err(error));
        }
        let checked = self.queue.borrow().check(&io);
        match checked {
            Err(error) => self.complete(io.tag, Err(error)),
            Ok(()) if io.len == 0 && io.op != Op::Flush => self.complete(io.tag, Ok(io.into_empty_output())),
            Ok(()) if !self.waiting.is_empty() && needed_memory(&io) > 0 => self.waiting.push_back(io),
            Ok(()) => {
                if let Err(io) = self.start(io) {
                    self.waiting.push_back(io);
                    self.retry.arm(true, &self.own.waker);
                }
            }
        }
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.queue.borrow_mut().turn(Some(&self.own));
        if !self.waiting.is_empty() {
            self.retry_waiting();
        }
        done.append(&mut self.own.done.borrow_mut());
    }

    fn cancel(&mut self, tag: Tag) {
        // librbd cannot cancel a request that it has.
        if let Some(at) = self.waiting.iter().position(|io| io.tag == tag) {
            self.waiting.remove(at);
            self.complete(tag, Err(IoError::Aborted));
        }
    }
}

impl Drop for RbdChannel {
    fn drop(&mut self) {
        self.own.is_closed.set(true);
        self.queue.borrow().on_channel_closed();
    }
}
