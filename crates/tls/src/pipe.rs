//! Input and output of the library, which calls back for both.
#![expect(unsafe_code, reason = "the library's callbacks have a pointer for a context")]

use s2n_tls::config::Builder;
use s2n_tls::connection::Connection;
use s2n_tls::error::Error;
use std::ptr;

/// The library's connection with its input and output buffers.
///
/// # Invariants
/// `buffers` comes from a box, which is freed after the connection that has its address. The
/// library uses it only in the calls of [`Pipe::with_input`], during which nothing else does.
pub(crate) struct Pipe {
    /// `None` only while the pipe is dropped.
    connection: Option<Connection>,
    buffers: *mut PipeBuffers,
}

struct PipeBuffers {
    /// The input that is left, valid during a call; null between calls.
    input: *const u8,
    input_len: usize,
    output: Vec<u8>,
    has_sent: bool,
}

// SAFETY: the box belongs to the pipe alone, only the pipe's methods use it, and its content and
// the connection may be used by any thread.
unsafe impl Send for Pipe {}

impl Pipe {
    pub(crate) fn new(mut connection: Connection) -> Result<Pipe, Error> {
        let buffers = PipeBuffers { input: ptr::null(), input_len: 0, output: Vec::new(), has_sent: false };
        let buffers = Box::into_raw(Box::new(buffers));
        connection.set_receive_callback(Some(receive))?.set_send_callback(Some(send))?;
        // SAFETY: the box lives longer than the connection.
        unsafe {
            connection.set_receive_context(buffers.cast())?.set_send_context(buffers.cast())?;
        }
        Ok(Pipe { connection: Some(connection), buffers })
    }

    /// Calls `work` with `input` as the peer's bytes. Returns its result and the number of bytes
    /// consumed.
    pub(crate) fn with_input<T>(
        &mut self,
        input: &[u8],
        work: impl FnOnce(&mut Connection) -> T,
    ) -> (T, usize) {
        // SAFETY: the box is alive, and the library does not use it now.
        unsafe { ((*self.buffers).input, (*self.buffers).input_len) = (input.as_ptr(), input.len()) };
        let result = work(self.connection());
        // SAFETY: as above. The null pointer is never read.
        let left = unsafe {
            (*self.buffers).input = ptr::null();
            std::mem::take(&mut (*self.buffers).input_len)
        };
        (result, input.len() - left)
    }

    /// The library's connection. Only [`Pipe::with_input`] may make it receive or send.
    pub(crate) fn connection(&mut self) -> &mut Connection {
        self.connection.as_mut().expect("the connection exists until the pipe is dropped")
    }

    pub(crate) fn output(&mut self) -> &mut Vec<u8> {
        // SAFETY: the box is alive, and the library does not use it before this borrow of the pipe
        // has ended.
        unsafe { &mut (*self.buffers).output }
    }

    /// Whether the library has not sent anything yet.
    pub(crate) fn has_sent_nothing(&self) -> bool {
        // SAFETY: as for `output`.
        unsafe { !(*self.buffers).has_sent }
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        self.connection = None;
        // SAFETY: the pointer came from a box, and the connection that used it has been dropped.
        drop(unsafe { Box::from_raw(self.buffers) });
    }
}

/// Makes clients accept any certificate of the server.
pub(crate) fn disable_verification(builder: &mut Builder) -> Result<&mut Builder, Error> {
    // SAFETY: memory is not affected. The library marks the function unsafe because it disables the
    // authentication of the peer, which the caller requested.
    unsafe { builder.disable_x509_verification() }
}

/// Reads up to `len` bytes of the peer for the library.
///
/// # Safety
/// `context` is the pipe's box and used by nobody else, and `buffer` has room for `len` bytes.
unsafe extern "C" fn receive(context: *mut libc::c_void, buffer: *mut u8, len: u32) -> libc::c_int {
    // SAFETY: as the caller promises.
    let buffers = unsafe { &mut *context.cast::<PipeBuffers>() };
    let here = buffers.input_len.min(len as usize).min(libc::c_int::MAX as usize);
    if here == 0 {
        return would_block();
    }
    // SAFETY: the input has that many bytes and lives during the call, the buffer has room, and
    // they do not overlap.
    unsafe {
        ptr::copy_nonoverlapping(buffers.input, buffer, here);
        buffers.input = buffers.input.add(here);
    }
    buffers.input_len -= here;
    here as libc::c_int
}

/// Appends `len` bytes of the library to the output.
///
/// # Safety
/// `context` is the pipe's box and used by nobody else, and `buffer` has `len` bytes.
unsafe extern "C" fn send(context: *mut libc::c_void, buffer: *const u8, len: u32) -> libc::c_int {
    // SAFETY: as the caller promises.
    let (buffers, bytes) =
        unsafe { (&mut *context.cast::<PipeBuffers>(), std::slice::from_raw_parts(buffer, len as usize)) };
    let Ok(sent) = libc::c_int::try_from(len) else { return would_block() };
    buffers.output.extend_from_slice(bytes);
    buffers.has_sent = true;
    sent
}

/// Sets EWOULDBLOCK and returns the callbacks' error value.
fn would_block() -> libc::c_int {
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() = libc::EWOULDBLOCK };
    -1
}
