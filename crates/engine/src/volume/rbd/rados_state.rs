//! State of a volume in an object beside its image, where every host that serves the image finds
//! it: persistent reservations.
//!
//! ```text
//!   POOL/[NAMESPACE/]blockmux.state.IMAGE-ID
//!     magic 7 | version u8 | generation u64 | CRC-32C of all that follows u32
//!     length u16 | identity of the image | image of the reservations
//! ```
//! A commit replaces the object in one operation, and only if it still begins with the expected
//! version and generation. The object stays when the image of the reservations is empty, so that no
//! older state is taken instead.

use super::limit::{HeldByCall, LIMIT, within};
use super::of_turn::OfTurn;
use super::volume::RbdVolume;
use crate::volume::state_writer::{Proposal, StateStore, StateWriter};
use blockmux_proto::volume_state::{Commit, SharedState, StateGeneration, StoredState, Transition};
use blockmux_rbd::error::RbdError;
use blockmux_rbd::image::Image;
use blockmux_rbd::object::ImageObject;
use blockmux_volume::Crc32c;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Stores the reservations of an image beside it, while this process owns the image.
pub struct RadosState {
    /// Of the present owner; `None` before this process has owned the image.
    writer: Mutex<OfTurn<Option<Arc<ObjectWriter>>>>,
}

type ObjectWriter = StateWriter<RecordStore<ImageObject>>;

/// Why stored state cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RadosStateError {
    /// The cluster does not tell it, or refuses to store it.
    #[error("object {object}: {error}")]
    Rbd {
        /// The object's name.
        object: String,
        /// The reason.
        error: RbdError,
    },
    /// The object cannot be replaced.
    #[error("object {object} cannot be written; see the log")]
    NotStored {
        /// The object's name.
        object: String,
    },
    /// Another commit was faster.
    #[error("object {object} was replaced meanwhile")]
    Stale {
        /// The object's name.
        object: String,
    },
    /// The object was written by a later version of the program.
    #[error(
        "object {object} is of version {version}, and this program knows {VERSION}; serve the image with a newer one"
    )]
    Later {
        /// The object's name.
        object: String,
        /// Version of its format.
        version: u8,
    },
    /// The object is damaged, or something else.
    #[error(
        "object {object} is not the stored state of this image, or is damaged; remove it with 'rados rm' to serve the \
         image without stored reservations"
    )]
    Foreign {
        /// The object's name.
        object: String,
    },
}

impl RadosState {
    /// Opens the state of an image; returns it with what is stored, `None` if nothing ever was.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn open(volume: &RbdVolume) -> Result<(Arc<RadosState>, Option<StoredState>), RadosStateError> {
        let state = RadosState::unowned();
        let (writer, stored) = open_writer(volume.image(), ())?;
        state.replace_writer(0, writer)?;
        Ok((state, stored))
    }

    /// The state of an image that this process does not own: nothing can be stored.
    #[must_use]
    pub fn unowned() -> Arc<RadosState> {
        Arc::new(RadosState { writer: Mutex::new(OfTurn::new(None)) })
    }

    /// Stores what was found again with a new generation, now that this process owns the image. So
    /// who has seen the one before knows that another process has owned the image since, and what a
    /// former owner still stores is stale.
    ///
    /// # Errors
    /// If it cannot be stored; [`RadosStateError::Stale`] if something else is stored by now.
    pub fn begin_turn(&self, found: StoredState) -> Result<StoredState, RadosStateError> {
        let Some(writer) = self.writer() else {
            return Err(RadosStateError::NotStored { object: self.name() });
        };
        begin_turn(&writer, found)
    }

    /// Reads what is stored beside an image, now that this process owns it, and stores on top of
    /// that from now on. Proposals that have no outcome are forgotten, so their owner must not ask
    /// for it. A call that does not return has the transition until it does.
    ///
    /// # Errors
    /// If it cannot be read, or a later turn has begun.
    pub(super) fn open_again(
        &self,
        image: Arc<Image>,
        transition: &Transition,
    ) -> Result<StoredState, RadosStateError> {
        let (writer, found) = open_writer(image, transition.clone())?;
        self.replace_writer(transition.number(), writer.clone())?;
        // Not by that of the next turn, which may have begun meanwhile.
        begin_turn(&writer, found.unwrap_or_default())
    }

    fn replace_writer(&self, turn: u64, writer: Arc<ObjectWriter>) -> Result<(), RadosStateError> {
        let replaced = self.lock().replace(turn, Some(writer));
        // Dropped without the lock.
        let refused = |_| RadosStateError::Rbd { object: self.name(), error: RbdError::GivenUp };
        replaced.map(drop).map_err(refused)
    }

    /// The object's name.
    #[must_use]
    pub fn name(&self) -> String {
        self.writer().map_or_else(|| PREFIX.to_owned(), |writer| writer.shared.store.name())
    }

    fn writer(&self) -> Option<Arc<ObjectWriter>> {
        self.lock().get().clone()
    }

    /// No lock of the volume's state is taken while it is held.
    fn lock(&self) -> MutexGuard<'_, OfTurn<Option<Arc<ObjectWriter>>>> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A writer for what is stored beside an image, and that. `held` is dropped when the cluster has
/// answered.
fn open_writer(
    image: Arc<Image>,
    held: impl HeldByCall,
) -> Result<(Arc<ObjectWriter>, Option<StoredState>), RadosStateError> {
    let identity = image.details().identity.clone();
    let open = move || {
        let store = RecordStore { object: ImageObject::new(&image, PREFIX)?, identity };
        let stored = store.read();
        Ok((store, stored))
    };
    let opened = within(LIMIT, open, drop, held);
    let (store, stored) =
        opened.map_err(|error| RadosStateError::Rbd { object: PREFIX.to_owned(), error })?;
    let stored = stored?;
    let generation = stored.as_ref().map_or_else(StateGeneration::default, |stored| stored.generation);
    Ok((Arc::new(StateWriter::new(store, (), generation)), stored))
}

/// See [`RadosState::begin_turn`].
fn begin_turn<O: RecordObject>(
    writer: &StateWriter<RecordStore<O>>,
    found: StoredState,
) -> Result<StoredState, RadosStateError> {
    let generation = writer.propose(found.generation, &found.image);
    let end = Instant::now() + LIMIT;
    loop {
        match writer.outcome(generation) {
            Some(Commit::Committed) => return Ok(StoredState { generation, ..found }),
            Some(Commit::Stale(_)) => return Err(RadosStateError::Stale { object: writer.name() }),
            None if Instant::now() < end => thread::park_timeout(Duration::from_millis(1)),
            _ => return Err(RadosStateError::NotStored { object: writer.name() }),
        }
    }
}

impl SharedState for RadosState {
    fn propose(&self, expected: StateGeneration, image: &[u8]) -> StateGeneration {
        self.writer().map_or(NEVER, |writer| writer.propose(expected, image))
    }

    fn outcome(&self, proposal: StateGeneration) -> Option<Commit> {
        match self.writer() {
            Some(writer) if proposal != NEVER => writer.outcome(proposal),
            _ => Some(Commit::Failed),
        }
    }
}

/// An object that is replaced as a whole.
trait RecordObject: Send + Sync + 'static {
    fn name(&self) -> String;
    /// The first `most` bytes; `None` if there is no object.
    fn read(&self, most: usize) -> Result<Option<Vec<u8>>, RbdError>;
    /// Replaces the content if it begins with `expected`, or creates the object; returns whether it
    /// has.
    fn replace(&self, expected: Option<&[u8]>, content: &[u8]) -> Result<bool, RbdError>;
    /// The cluster refuses all requests of this client from now on.
    fn on_blocklisted(&self);
}

impl RecordObject for ImageObject {
    fn name(&self) -> String {
        ImageObject::name(self)
    }

    fn read(&self, most: usize) -> Result<Option<Vec<u8>>, RbdError> {
        ImageObject::read(self, most)
    }

    fn replace(&self, expected: Option<&[u8]>, content: &[u8]) -> Result<bool, RbdError> {
        ImageObject::replace(self, expected, content)
    }

    fn on_blocklisted(&self) {
        self.image().cluster().note_blocklisted();
    }
}

/// States in the form of a record.
struct RecordStore<O> {
    object: O,
    identity: String,
}

impl<O: RecordObject> RecordStore<O> {
    fn read(&self) -> Result<Option<StoredState>, RadosStateError> {
        // One byte more shows that it is too long.
        let content = self.object.read(MAX_RECORD + 1).map_err(|error| self.failed(error))?;
        content.map(|content| self.parse(&content)).transpose()
    }

    fn parse(&self, content: &[u8]) -> Result<StoredState, RadosStateError> {
        let foreign = || RadosStateError::Foreign { object: self.object.name() };
        let (magic, rest) = content.split_at_checked(MAGIC.len()).ok_or_else(foreign)?;
        let (version, rest) = rest.split_first().ok_or_else(foreign)?;
        if magic != MAGIC || content.len() > MAX_RECORD {
            return Err(foreign());
        }
        if *version != VERSION {
            return Err(RadosStateError::Later { object: self.object.name(), version: *version });
        }
        self.parse_body(rest).ok_or_else(foreign)
    }

    /// What follows the version.
    fn parse_body(&self, body: &[u8]) -> Option<StoredState> {
        let (generation, rest) = body.split_first_chunk()?;
        let (sum, rest) = rest.split_first_chunk()?;
        let (len, named) = rest.split_first_chunk()?;
        let (identity, image) = named.split_at_checked(u16::from_be_bytes(*len).into())?;
        let generation = u64::from_be_bytes(*generation);
        // Others can follow it.
        i64::try_from(generation).ok()?;
        let is_whole = Crc32c::of(rest).value() == u32::from_be_bytes(*sum);
        (is_whole && identity == self.identity.as_bytes())
            .then(|| StoredState { generation: StateGeneration(generation), image: image.to_vec() })
    }

    fn record(&self, generation: StateGeneration, image: &[u8]) -> Vec<u8> {
        // A cluster's identifier and two short texts.
        let len = u16::try_from(self.identity.len()).unwrap_or(u16::MAX);
        let named = [&len.to_be_bytes()[..], self.identity.as_bytes(), image].concat();
        [&head(generation)[..], &Crc32c::of(&named).value().to_be_bytes(), &named].concat()
    }

    fn failed(&self, error: RbdError) -> RadosStateError {
        if error.is_blocklisted() {
            self.object.on_blocklisted();
        }
        RadosStateError::Rbd { object: self.object.name(), error }
    }
}

/// The beginning of the record of a generation, by which a commit knows it.
fn head(generation: StateGeneration) -> Vec<u8> {
    [&MAGIC[..], &[VERSION], &generation.0.to_be_bytes()].concat()
}

impl<O: RecordObject> StateStore for RecordStore<O> {
    type Held = ();
    type Error = RadosStateError;

    fn commit(&self, _held: &mut (), proposal: &Proposal) -> Result<Commit, RadosStateError> {
        let is_first = proposal.expected == StateGeneration::default();
        let expected = (!is_first).then(|| head(proposal.expected));
        let record = self.record(proposal.generation, &proposal.image);
        let replaced = self.object.replace(expected.as_deref(), &record);
        if replaced.map_err(|error| self.failed(error))? {
            return Ok(Commit::Committed);
        }
        let stored = self.read()?.unwrap_or_default();
        // A commit that was not answered, and sent again, finds itself.
        if stored.generation == proposal.generation && stored.image == proposal.image {
            return Ok(Commit::Committed);
        }
        Ok(Commit::Stale(stored))
    }

    fn name(&self) -> String {
        self.object.name()
    }
}

/// The generation of a proposal that is not stored.
const NEVER: StateGeneration = StateGeneration(u64::MAX);
const MAGIC: &[u8; 7] = b"bmux-st";
const VERSION: u8 = 1;
/// The object's name begins with it, and ends with the identifier of the image.
const PREFIX: &str = "blockmux.state.";
/// Maximum length of a record, in bytes; 1,024 registrations with names of 600 bytes need less.
const MAX_RECORD: usize = 2 << 20;

#[cfg(test)]
mod tests {
    use super::*;
    use blockmux_rbd::error::Errno;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    /// An object in memory, which several clients use.
    #[derive(Clone, Default)]
    struct FakeObject(Arc<FakeCluster>);

    #[derive(Default)]
    struct FakeCluster {
        content: Mutex<Option<Vec<u8>>>,
        /// The error number of the next changes.
        error: Mutex<Option<i32>>,
        /// Changes are made, but not answered.
        is_silent: AtomicBool,
        is_blocklisted: AtomicBool,
    }

    impl FakeObject {
        fn set(&self, content: Option<Vec<u8>>) {
            *self.0.content.lock().unwrap() = content;
        }

        fn fail(&self, error: Option<i32>) {
            *self.0.error.lock().unwrap() = error;
        }

        fn content(&self) -> Vec<u8> {
            self.0.content.lock().unwrap().clone().unwrap()
        }
    }

    impl RecordObject for FakeObject {
        fn name(&self) -> String {
            "blockmux.state.1".to_owned()
        }

        fn read(&self, most: usize) -> Result<Option<Vec<u8>>, RbdError> {
            let content = self.0.content.lock().unwrap().clone();
            Ok(content.map(|content| content.into_iter().take(most).collect()))
        }

        fn replace(&self, expected: Option<&[u8]>, content: &[u8]) -> Result<bool, RbdError> {
            if let Some(number) = *self.0.error.lock().unwrap() {
                return Err(RbdError::Call { call: "rados_write_op_operate", error: Errno(number) });
            }
            let mut stored = self.0.content.lock().unwrap();
            let is_expected = match (&*stored, expected) {
                (None, None) => true,
                (Some(stored), Some(expected)) => stored.starts_with(expected),
                _ => false,
            };
            if is_expected {
                *stored = Some(content.to_vec());
            }
            Ok(is_expected && !self.0.is_silent.load(Ordering::Relaxed))
        }

        fn on_blocklisted(&self) {
            self.0.is_blocklisted.store(true, Ordering::Relaxed);
        }
    }

    const IDENTITY: &str = "cluster pool 1 image 1";

    fn store(object: &FakeObject) -> RecordStore<FakeObject> {
        RecordStore { object: object.clone(), identity: IDENTITY.to_owned() }
    }

    /// A process that serves the image.
    fn process(object: &FakeObject) -> (StateWriter<RecordStore<FakeObject>>, StateGeneration) {
        let stored = store(object).read().unwrap().unwrap_or_default();
        (StateWriter::new(store(object), (), stored.generation), stored.generation)
    }

    fn outcome(writer: &StateWriter<RecordStore<FakeObject>>, proposal: StateGeneration) -> Commit {
        std::iter::repeat_with(|| {
            thread::yield_now();
            writer.outcome(proposal)
        })
        .flatten()
        .next()
        .unwrap()
    }

    #[test]
    fn the_second_process_finds_what_the_first_has_stored_also_nothing() {
        let object = FakeObject::default();
        let (first, none) = process(&object);
        assert_eq!(none, StateGeneration(0));
        let one = first.propose(none, b"one");
        assert_eq!(outcome(&first, one), Commit::Committed);
        let two = first.propose(one, b"");
        assert_eq!(outcome(&first, two), Commit::Committed);
        let stored = store(&object).read().unwrap();
        assert_eq!(stored, Some(StoredState { generation: two, image: Vec::new() }));
    }

    #[test]
    fn of_two_processes_one_commits_and_the_other_gets_what_is_stored() {
        let object = FakeObject::default();
        let [(ours, none), (theirs, _)] = [(); 2].map(|()| process(&object));
        let first = theirs.propose(none, b"theirs");
        assert_eq!(outcome(&theirs, first), Commit::Committed);
        let lost = ours.propose(none, b"ours");
        let stored = StoredState { generation: first, image: b"theirs".to_vec() };
        assert_eq!(outcome(&ours, lost), Commit::Stale(stored.clone()));
        // What was refused is nothing to build on.
        let above = ours.propose(lost, b"above");
        assert_eq!(outcome(&ours, above), Commit::Stale(stored));
        let again = ours.propose(first, b"both");
        assert_eq!(outcome(&ours, again), Commit::Committed);
        let late = theirs.propose(first, b"late");
        assert!(matches!(outcome(&theirs, late), Commit::Stale(stored) if stored.generation == again));
        // Somebody has removed the object.
        object.set(None);
        let gone = ours.propose(again, b"gone");
        assert_eq!(outcome(&ours, gone), Commit::Stale(StoredState::default()));
    }

    #[test]
    fn errors_fail_the_commit_and_a_blocklisted_client_is_fenced() {
        let object = FakeObject::default();
        let (writer, none) = process(&object);
        for number in [libc::ETIMEDOUT, libc::ENOSPC, libc::EPERM] {
            object.fail(Some(number));
            let failed = writer.propose(none, b"a");
            assert_eq!(outcome(&writer, failed), Commit::Failed);
        }
        assert!(!object.0.is_blocklisted.load(Ordering::Relaxed));
        object.fail(Some(libc::ESHUTDOWN));
        let fenced = writer.propose(none, b"a");
        assert_eq!(outcome(&writer, fenced), Commit::Failed);
        assert!(object.0.is_blocklisted.load(Ordering::Relaxed));
        object.fail(None);
        let next = writer.propose(none, b"a");
        assert_eq!(outcome(&writer, next), Commit::Committed);
    }

    #[test]
    fn a_commit_that_finds_itself_is_committed() {
        let object = FakeObject::default();
        object.0.is_silent.store(true, Ordering::Relaxed);
        let (writer, none) = process(&object);
        let done = writer.propose(none, b"a");
        assert_eq!(outcome(&writer, done), Commit::Committed);
    }

    #[test]
    fn an_object_that_is_no_record_is_refused_and_only_its_beginning_is_read() {
        let object = FakeObject::default();
        let (writer, none) = process(&object);
        let first = writer.propose(none, b"image of some length");
        assert_eq!(outcome(&writer, first), Commit::Committed);
        let record = object.content();
        let error = |content: Vec<u8>| {
            object.set(Some(content));
            store(&object).read().unwrap_err().to_string()
        };
        for len in 0..record.len() {
            assert!(error(record[..len].to_vec()).contains("is not the stored state"), "{len} bytes");
        }
        // The generation has no sum: it is what the record is compared by.
        for at in (0..record.len()).filter(|at| !(MAGIC.len()..MAGIC.len() + 9).contains(at)) {
            let mut damaged = record.clone();
            damaged[at] ^= 0x10;
            assert!(error(damaged).contains("is not the stored state"), "byte {at}");
        }
        let mut later = record.clone();
        later[MAGIC.len()] = 2;
        assert_eq!(
            error(later),
            "object blockmux.state.1 is of version 2, and this program knows 1; serve the image with a newer one"
        );
        let long = [&record[..], &vec![0; MAX_RECORD]].concat();
        assert!(error(long).contains("is not the stored state"));
        let other = RecordStore { object: object.clone(), identity: "another".to_owned() };
        object.set(Some(record));
        assert!(matches!(other.read(), Err(RadosStateError::Foreign { .. })));
        // Nor is it overwritten.
        object.set(Some(vec![7; 100]));
        let refused = writer.propose(first, b"next");
        assert_eq!(outcome(&writer, refused), Commit::Failed);
        assert_eq!(object.content(), [7; 100]);
    }
}
