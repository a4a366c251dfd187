//! What lies between the library and its driver: the library calls back for input and output.
#![expect(unsafe_code, reason = "the library's callbacks have a pointer for a context")]

use s2n_tls::config::Builder;
use s2n_tls::connection::Connection;
use s2n_tls::error::Error;
use std::ptr;

/// The library's connection, and what it reads from and writes to.
///
/// # Invariants
/// `ends` comes from a box, which is freed after the connection that has its address. The library
/// uses it only in the calls of [`Pipe::with_input`], during which nobody else does.
pub(crate) struct Pipe {
    /// Taken only when the pipe is dropped.
    connection: Option<Connection>,
    ends: *mut Ends,
}

struct Ends {
    /// What is left of the input, valid while a call lasts; none between calls.
    input: *const u8,
    input_len: usize,
    output: Vec<u8>,
    has_sent: bool,
}

impl Pipe {
    pub(crate) fn new(mut connection: Connection) -> Result<Pipe, Error> {
        let ends = Ends { input: ptr::null(), input_len: 0, output: Vec::new(), has_sent: false };
        let ends = Box::into_raw(Box::new(ends));
        connection.set_receive_callback(Some(receive))?.set_send_callback(Some(send))?;
        // SAFETY: the box lives longer than the connection.
        unsafe {
            connection.set_receive_context(ends.cast())?.set_send_context(ends.cast())?;
        }
        Ok(Pipe { connection: Some(connection), ends })
    }

    /// Has the library do something while `input` is what came from the peer. How much of it was
    /// taken is told, too.
    pub(crate) fn with_input<T>(
        &mut self,
        input: &[u8],
        work: impl FnOnce(&mut Connection) -> T,
    ) -> (T, usize) {
        // SAFETY: the box is alive, and the library does not use it now.
        unsafe { ((*self.ends).input, (*self.ends).input_len) = (input.as_ptr(), input.len()) };
        let result = work(self.connection());
        // SAFETY: as above. What is forgotten here is never read again.
        let left = unsafe {
            (*self.ends).input = ptr::null();
            std::mem::take(&mut (*self.ends).input_len)
        };
        (result, input.len() - left)
    }

    /// The library's connection, for questions: it must not be made to receive or to send but by
    /// [`Pipe::with_input`].
    pub(crate) fn connection(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("it is there until the pipe is dropped")
    }

    pub(crate) fn output(&mut self) -> &mut Vec<u8> {
        // SAFETY: the box is alive, and the library does not use it before this borrow of the pipe
        // has ended.
        unsafe { &mut (*self.ends).output }
    }

    /// Whether the library has never sent anything.
    pub(crate) fn has_sent_nothing(&self) -> bool {
        // SAFETY: as for `output`.
        unsafe { !(*self.ends).has_sent }
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.connection = None;
        // SAFETY: it came from a box, and the connection that knew it is gone.
        drop(unsafe { Box::from_raw(self.ends) });
    }
}

/// Has clients take any certificate of the server's.
pub(crate) fn disable_verification(builder: &mut Builder) -> Result<&mut Builder, Error> {
    // SAFETY: no memory is at stake. The library calls it unsafe because the peer is not
    // authenticated then, which the caller has asked for.
    unsafe { builder.disable_x509_verification() }
}

/// The library wants `len` bytes of the peer's.
///
/// # Safety
/// `context` is the pipe's box and used by nobody else, and `buffer` has room for `len` bytes.
unsafe extern "C" fn receive(context: *mut libc::c_void, buffer: *mut u8, len: u32) -> libc::c_int {
    // SAFETY: as the caller promises.
    let ends = unsafe { &mut *context.cast::<Ends>() };
    let here = ends.input_len.min(len as usize).min(libc::c_int::MAX as usize);
    if here == 0 {
        return later();
    }
    // SAFETY: the input has that many bytes and lives during the call, the buffer has room, and
    // they are apart.
    unsafe {
        ptr::copy_nonoverlapping(ends.input, buffer, here);
        ends.input = ends.input.add(here);
    }
    ends.input_len -= here;
    here as libc::c_int
}

/// The library sends `len` bytes to the peer.
///
/// # Safety
/// `context` is the pipe's box and used by nobody else, and `buffer` has `len` bytes.
unsafe extern "C" fn send(context: *mut libc::c_void, buffer: *const u8, len: u32) -> libc::c_int {
    // SAFETY: as the caller promises.
    let (ends, bytes) =
        unsafe { (&mut *context.cast::<Ends>(), std::slice::from_raw_parts(buffer, len as usize)) };
    let Ok(sent) = libc::c_int::try_from(len) else { return later() };
    ends.output.extend_from_slice(bytes);
    ends.has_sent = true;
    sent
}

/// Nothing goes now.
fn later() -> libc::c_int {
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() = libc::EWOULDBLOCK };
    -1
}
