//! Queries of the object map, which block, on a thread that exists only while there are any.

use super::queue::RbdQueue;
use super::volume::ImageState;
use crate::core::reactor::Inbox;
use crate::volume::core_queues::CoreQueues;
use blockmux_rbd::error::{Errno, RbdError};
use blockmux_rbd::requests::RequestError;
use blockmux_volume::Extent;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Which blocks have data.
pub(super) type StatusResult = Result<Vec<Extent>, RequestError>;

/// A query of a core.
pub(super) struct StatusQuery {
    pub(super) offset: u64,
    pub(super) len: u64,
    /// The core, and the request of its queue that gets the answer.
    pub(super) core: Inbox,
    pub(super) request: usize,
}

/// The queries of a volume that have no answer: at most as many as its channels have requests.
#[derive(Default)]
pub(super) struct StatusQueries(Mutex<PendingQueries>);

#[derive(Default)]
struct PendingQueries {
    queries: VecDeque<StatusQuery>,
    /// A thread answers them.
    is_served: bool,
}

impl StatusQueries {
    fn pending(&self) -> MutexGuard<'_, PendingQueries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Has a query answered by a thread.
pub(super) fn ask(image: &Arc<ImageState>, query: StatusQuery) {
    let is_served = {
        let mut pending = image.status.pending();
        pending.queries.push_back(query);
        std::mem::replace(&mut pending.is_served, true)
    };
    if is_served {
        return;
    }
    let served = image.clone();
    if thread::Builder::new().name("rbd status".to_owned()).spawn(move || serve(&served)).is_err() {
        // Without a thread nothing is known of the blocks, which is an answer.
        serve_with(image, |query| Ok(vec![Extent::data(query.len)]));
    }
}

fn serve(image: &Arc<ImageState>) {
    serve_with(image, |query| {
        let found = image.image.extents(query.offset, query.len);
        found.map(|extents| extents.unwrap_or_else(|| vec![Extent::data(query.len)])).map_err(|error| {
            let errno = if let RbdError::Call { error, .. } = error { error } else { Errno(libc::EIO) };
            RequestError::Errno(errno)
        })
    });
}

/// Answers all queries.
fn serve_with(image: &ImageState, answer: impl Fn(&StatusQuery) -> StatusResult) {
    loop {
        let query = {
            let mut pending = image.status.pending();
            let query = pending.queries.pop_front();
            pending.is_served = query.is_some();
            query
        };
        let Some(query) = query else { return };
        let (result, id, request) = (answer(&query), image.id, query.request);
        query.core.send(move |core| {
            // It is kept until all of its requests have completed.
            if let Some(queue) = core.local(CoreQueues::<RbdQueue>::default).find(id) {
                queue.borrow_mut().on_status(request, result);
            }
        });
    }
}
