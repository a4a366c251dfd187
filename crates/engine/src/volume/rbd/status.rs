//! Queries of the object map, which block, on a thread that exists only while there are any.

use blockmux_rbd::error::{Errno, RbdError};
use blockmux_rbd::image::Image;
use blockmux_rbd::requests::RequestError;
use blockmux_volume::Extent;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Which blocks have data.
pub(super) type StatusResult = Result<Vec<Extent>, RequestError>;

/// A query about a range.
pub(super) struct StatusQuery {
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Takes the answer, on any thread.
    pub(super) answer: Box<dyn FnOnce(StatusResult) + Send>,
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
    /// Has a query answered by a thread.
    pub(super) fn ask(self: &Arc<StatusQueries>, image: &Arc<Image>, query: StatusQuery) {
        let is_served = {
            let mut pending = self.pending();
            pending.queries.push_back(query);
            std::mem::replace(&mut pending.is_served, true)
        };
        if is_served {
            return;
        }
        let (queries, image) = (self.clone(), image.clone());
        let serve = move || queries.serve(|query| extents(&image, query));
        if thread::Builder::new().name("rbd status".to_owned()).spawn(serve).is_err() {
            // Without a thread nothing is known of the blocks, which is an answer.
            self.serve(|query| Ok(vec![Extent::data(query.len)]));
        }
    }

    /// Answers all queries.
    fn serve(&self, find: impl Fn(&StatusQuery) -> StatusResult) {
        loop {
            let query = {
                let mut pending = self.pending();
                let query = pending.queries.pop_front();
                pending.is_served = query.is_some();
                query
            };
            let Some(query) = query else { return };
            let found = find(&query);
            (query.answer)(found);
        }
    }

    fn pending(&self) -> MutexGuard<'_, PendingQueries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn extents(image: &Image, query: &StatusQuery) -> StatusResult {
    let found = image.extents(query.offset, query.len);
    found.map(|extents| extents.unwrap_or_else(|| vec![Extent::data(query.len)])).map_err(|error| {
        let errno = if let RbdError::Call { error, .. } = error { error } else { Errno(libc::EIO) };
        RequestError::Errno(errno)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn one_thread_answers_all_queries_that_come_meanwhile() {
        let queries = StatusQueries::default();
        let (sender, answers) = mpsc::channel();
        let query = |offset| {
            let sender = sender.clone();
            let answer = Box::new(move |found: StatusResult| sender.send((offset, found)).unwrap());
            StatusQuery { offset, len: 512, answer }
        };
        queries.pending().queries.extend([query(0), query(512)]);
        queries.pending().is_served = true;
        queries.serve(|query| {
            if query.offset == 0 {
                queries.pending().queries.push_back(StatusQuery {
                    offset: 1024,
                    len: 512,
                    answer: Box::new(|found| assert_eq!(found, Ok(vec![Extent::data(1024)]))),
                });
            }
            Ok(vec![Extent::data(query.offset.max(512))])
        });
        drop(sender);
        let offsets: Vec<_> = answers.iter().map(|(offset, _)| offset).collect();
        assert_eq!(offsets, [0, 512]);
        assert!(!queries.pending().is_served && queries.pending().queries.is_empty());
    }
}
