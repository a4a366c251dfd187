//! Looks at many paths of which some may hang, such as those on a network file system without its
//! server. Nobody waits for them longer than [`TIMEOUT`], however many they are.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// Calls `look`, which may hang, for each item; returns `None` for those that do not answer in
/// time. Their threads are left behind, at most [`MAX_HANGING`].
pub(crate) fn look_at_all<I, T>(
    items: Vec<I>,
    look: impl Fn(&I) -> T + Send + Sync + 'static,
) -> Vec<Option<T>>
where
    I: Send + Sync + 'static,
    T: Send + 'static,
{
    let mut found: Vec<Option<T>> = items.iter().map(|_| None).collect();
    let (sender, answers) = mpsc::channel();
    let looks = Arc::new(Looks { items, next: AtomicUsize::new(0), look });
    let (mut left, mut threads, mut deadline) = (found.len(), 0_usize, Instant::now() + TIMEOUT);
    while left > 0 {
        // All threads so far hang: as many again take the items that are left.
        let untaken = found.len().saturating_sub(looks.next.load(Ordering::Acquire));
        let more = (0..threads.max(1).min(untaken)).filter(|_| Looks::start(&looks, &sender)).count();
        if more > 0 {
            threads += more;
            deadline = Instant::now() + TIMEOUT;
        }
        if threads == 0 || Instant::now() >= deadline {
            break;
        }
        while left > 0
            && let Ok((nth, answer)) = answers.recv_timeout(PAUSE)
        {
            found[nth] = Some(answer);
            left -= 1;
        }
    }
    found
}

/// Items to look at, which threads take one after the other.
struct Looks<I, F> {
    items: Vec<I>,
    next: AtomicUsize,
    look: F,
}

impl<I: Send + Sync + 'static, F: Send + Sync + 'static> Looks<I, F> {
    /// Starts a thread that looks at the items that no other has taken; returns whether it could.
    fn start<T: Send + 'static>(looks: &Arc<Looks<I, F>>, sender: &Sender<(usize, T)>) -> bool
    where
        F: Fn(&I) -> T,
    {
        let hanging = Hanging::new();
        if hanging.before >= MAX_HANGING {
            return false;
        }
        let (looks, sender) = (looks.clone(), sender.clone());
        let run = move || {
            let _hanging = hanging;
            loop {
                let nth = looks.next.fetch_add(1, Ordering::AcqRel);
                let Some(item) = looks.items.get(nth) else { return };
                // The caller may have given up.
                let _ = sender.send((nth, (looks.look)(item)));
            }
        };
        thread::Builder::new().name("dead paths".to_owned()).spawn(run).is_ok()
    }
}

/// Counts a thread until it ends, also by a panic.
struct Hanging {
    /// Number of other threads when it was started.
    before: usize,
}

impl Hanging {
    fn new() -> Hanging {
        Hanging { before: THREADS.fetch_add(1, Ordering::AcqRel) }
    }
}

impl Drop for Hanging {
    fn drop(&mut self) {
        THREADS.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Number of threads that look at paths.
static THREADS: AtomicUsize = AtomicUsize::new(0);
/// Maximum number of threads that look at paths, also of those that hang.
const MAX_HANGING: usize = 64;
/// Time for the last paths to answer.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Time without an answer after which further threads are started.
const PAUSE: Duration = Duration::from_millis(50);

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn items_that_hang_delay_no_others_and_are_given_up() {
        let (gate, closed) = mpsc::channel::<()>();
        let closed = Mutex::new(closed);
        let is_hanging = |item: &usize| item.is_multiple_of(3);
        let found = look_at_all((0..30).collect(), move |item| {
            if is_hanging(item) {
                let _ = closed.lock().unwrap().recv();
            }
            item * 2
        });
        let expected: Vec<_> = (0..30).map(|item| (!is_hanging(&item)).then_some(item * 2)).collect();
        assert_eq!(found, expected);
        drop(gate);
        assert_eq!(look_at_all(Vec::<u8>::new(), |item| *item), []);
    }
}
