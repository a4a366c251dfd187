//! A channel to the device of a back end.

use super::core_queue::CoreQueue;
use super::state::OpenDisk;
use crate::volume::core_queues::ChannelCompletions;
use blockmux_volume::{Channel, Completion, Io, Waker};
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

pub(super) struct VhostUserChannel {
    disk: Arc<OpenDisk>,
    queue: Rc<RefCell<CoreQueue>>,
    own: Rc<ChannelCompletions>,
}

impl VhostUserChannel {
    pub(super) fn new(
        disk: &Arc<OpenDisk>,
        queue: Rc<RefCell<CoreQueue>>,
        depth: u32,
        waker: Waker,
    ) -> VhostUserChannel {
        VhostUserChannel { disk: disk.clone(), queue, own: ChannelCompletions::new(depth, waker) }
    }
}

impl Channel for VhostUserChannel {
    #[inline]
    fn submit(&mut self, io: Io) {
        match self.disk.0.check(&io) {
            Ok(()) => self.queue.borrow_mut().submit(io, &self.own),
            Err(error) => self.own.done.borrow_mut().push(Completion { tag: io.tag, result: Err(error) }),
        }
    }

    #[inline]
    fn kick(&mut self) {
        self.queue.borrow_mut().send(Some(&self.own));
    }

    #[inline]
    fn poll(&mut self, done: &mut Vec<Completion>) {
        self.queue.borrow_mut().turn(Some(&self.own));
        done.append(&mut self.own.done.borrow_mut());
    }
}

impl Drop for VhostUserChannel {
    fn drop(&mut self) {
        self.own.is_closed.set(true);
        self.queue.borrow().on_channel_closed();
    }
}
