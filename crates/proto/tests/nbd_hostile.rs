//! Clients that violate NBD. Each gets exactly the expected reply, and nothing else is affected:
//! not the session if it can continue, not the volume, and not the next client.

use blockmux_proto::driver::session::{Demand, ProtocolError, StreamSession};
use blockmux_proto::driver::target::IoSource;
use blockmux_proto::exports::{Export, Exports};
use blockmux_proto::nbd::server::NbdTargetSession;
use blockmux_volume::conformance::TestCore;
use blockmux_volume::{
    Channel, Chunk, Completion, Extent, Io, MemVolume, Memory, NullVolume, Op, Output, Pool, SgList, Tag,
    Volume, Waker,
};
use blockmux_wire::nbd::handshake::*;
use blockmux_wire::nbd::transmission::*;
use std::sync::Arc;
use std::time::Instant;

#[test]
fn a_malformed_option_is_refused_and_the_next_one_works() {
    let invalid = Rep::NBD_REP_ERR_INVALID;
    let half = info_data("disk0", &[3])[..12].to_vec();
    let uncounted = [info_data("disk0", &[]), vec![0, 3]].concat();
    let table: [(&str, Opt, Vec<u8>, Rep); 19] = [
        ("go without data", Opt::NBD_OPT_GO, vec![], invalid),
        ("go with half a length", Opt::NBD_OPT_GO, vec![0, 0], invalid),
        ("a name longer than its option", Opt::NBD_OPT_GO, text_of(99, "disk0"), invalid),
        ("a name of 4 GiB", Opt::NBD_OPT_INFO, text_of(u32::MAX, "disk0"), invalid),
        ("a name without requests", Opt::NBD_OPT_INFO, text("disk0"), invalid),
        ("half a request", Opt::NBD_OPT_INFO, half, invalid),
        ("more requests than counted", Opt::NBD_OPT_GO, uncounted, invalid),
        ("a name with NUL", Opt::NBD_OPT_GO, info_data("disk0\0", &[]), invalid),
        ("a name that is not UTF-8", Opt::NBD_OPT_GO, b"\0\0\0\x02\xc3\x28\0\0".to_vec(), invalid),
        ("a name of 4097 bytes", Opt::NBD_OPT_GO, info_data(&"a".repeat(4097), &[]), invalid),
        ("an unknown name", Opt::NBD_OPT_GO, info_data("disk1", &[]), Rep::NBD_REP_ERR_UNKNOWN),
        ("a list with data", Opt::NBD_OPT_LIST, vec![0], invalid),
        ("structured replies with data", Opt::NBD_OPT_STRUCTURED_REPLY, vec![1], invalid),
        ("extended headers with data", Opt::NBD_OPT_EXTENDED_HEADERS, vec![1], invalid),
        ("TLS", Opt::NBD_OPT_STARTTLS, vec![], Rep::NBD_REP_ERR_UNSUP),
        ("TLS with data", Opt::NBD_OPT_STARTTLS, vec![1], invalid),
        ("a withdrawn option", Opt::NBD_OPT_PEEK_EXPORT, text("disk0"), Rep::NBD_REP_ERR_UNSUP),
        ("option 0", Opt(0), vec![], Rep::NBD_REP_ERR_UNSUP),
        ("the greatest option number", Opt(u32::MAX), vec![7; 300], Rep::NBD_REP_ERR_UNSUP),
    ];
    for (what, opt, data, rep) in table {
        let mut client = Client::greeted();
        let answer = client.exchange(&option(opt, &data));
        assert_eq!(only_reply(&answer), (opt, rep), "{what}");
        client.continues_the_handshake();
    }
}

#[test]
fn a_malformed_context_query_selects_nothing_and_undoes_the_selection_before() {
    let good = context_data("", &["base:allocation"]);
    let table: [(&str, Vec<u8>); 6] = [
        ("no data", vec![]),
        ("a name and no count", text("")),
        ("more queries counted than sent", [text(""), vec![0, 0, 0, 2], text("base:allocation")].concat()),
        ("4 billion queries", [text(""), vec![0xff; 4]].concat()),
        ("a query without namespace", context_data("", &["base:allocation", "allocation"])),
        ("a byte behind the last query", [good.clone(), vec![0]].concat()),
    ];
    for (what, data) in table {
        let set = Opt::NBD_OPT_SET_META_CONTEXT;
        let mut client = Client::greeted();
        client.exchange(&option(Opt::NBD_OPT_STRUCTURED_REPLY, &[]));
        client.exchange(&option(set, &good));
        let answer = client.exchange(&option(set, &data));
        assert_eq!(only_reply(&answer), (set, Rep::NBD_REP_ERR_INVALID), "{what}");
        client.continues_the_handshake();
        let status = client.exchange(&Request::new(Cmd::NBD_CMD_BLOCK_STATUS, 0, 512).compact());
        assert_eq!(Form::Structured.errno(&status), Errno::NBD_EINVAL, "{what}");
    }
}

#[test]
fn an_option_out_of_order_is_refused_and_changes_nothing() {
    let context = context_data("", &["base:allocation"]);
    let table: [(Form, Opt, &[u8], Rep); 3] = [
        (Form::Simple, Opt::NBD_OPT_SET_META_CONTEXT, &context, Rep::NBD_REP_ERR_INVALID),
        (Form::Simple, Opt::NBD_OPT_LIST_META_CONTEXT, &context, Rep::NBD_REP_ERR_INVALID),
        (Form::Extended, Opt::NBD_OPT_STRUCTURED_REPLY, &[], Rep::NBD_REP_ERR_EXT_HEADER_REQD),
    ];
    for (form, opt, data, rep) in table {
        let mut client = Client::greeted();
        if let Some(earlier) = form.option() {
            client.exchange(&option(earlier, &[]));
        }
        assert_eq!(only_reply(&client.exchange(&option(opt, data))), (opt, rep));
        client.continues_the_handshake();
        client.reads_a_block(form);
    }
}

#[test]
fn an_option_of_any_size_is_skipped_and_never_buffered() {
    for opt in [Opt::NBD_OPT_GO, Opt::NBD_OPT_SET_META_CONTEXT] {
        let mut client = Client::greeted();
        let answer = client.exchange(&option(opt, &[0; (64 << 10) + 1]));
        assert_eq!(only_reply(&answer), (opt, Rep::NBD_REP_ERR_TOO_BIG));
        client.continues_the_handshake();
    }
    let mut client = Client::greeted();
    let head = &option(Opt(4711), &[])[..12];
    client.exchange(&[head, &u32::MAX.to_be_bytes()].concat());
    for _ in 0..64 {
        assert_eq!(client.exchange(&[0; 1 << 20]), b"");
        assert!(matches!(client.session.demand(), Demand::Bytes(1)));
    }
}

#[test]
fn an_invalid_handshake_ends_the_session_with_the_violated_rule() {
    let (newstyle, export_name) = ("proto.md, \"Newstyle negotiation\"", "proto.md, NBD_OPT_EXPORT_NAME");
    let flags = ("set a client flag that was not offered", "proto.md, \"Client flags\"");
    let magic = ("sent an option with a wrong magic number", newstyle);
    let malformed = ("chose an export by a malformed name", export_name);
    let name = |name: &[u8]| [&FLAGS, &option(Opt::NBD_OPT_EXPORT_NAME, name)[..]].concat();
    let extended = [&FLAGS, &option(Opt::NBD_OPT_EXTENDED_HEADERS, &[])[..]].concat();
    let table: [(Vec<u8>, (&str, &str)); 9] = [
        (b"GET / HTTP/1.1\r\n".to_vec(), flags),
        (b"\0\0\0\x04".to_vec(), flags),
        ([&FLAGS, &[0; 16][..]].concat(), magic),
        ([&FLAGS, &Request::new(Cmd::NBD_CMD_READ, 0, 512).compact()[..]].concat(), magic),
        (name(&[b'a'; 4097]), ("asked for an export with a name longer than 4096 bytes", newstyle)),
        (name(b"disk1"), ("chose an export that does not exist", export_name)),
        (name(b"a\0"), malformed),
        (name(b"\xff"), malformed),
        (
            [&extended, &name(b"disk0")[4..]].concat(),
            ("used NBD_OPT_EXPORT_NAME after it had agreed on extended headers", export_name),
        ),
    ];
    for (bytes, (what, reference)) in table {
        let exports = exports();
        let mut client = Client::connect(&exports);
        assert_eq!(client.sends(&bytes), Err(ProtocolError { what, reference }));
        let mut next = Client::connect(&exports);
        next.chooses("", Form::Simple);
        next.reads_a_block(Form::Simple);
    }
}

#[test]
fn a_thousand_options_and_four_for_each_export_are_answered_and_one_more_ends_the_session() {
    let mut client = Client::greeted();
    for _ in 0..1000 + 4 * exports().iter().count() {
        let answer = client.exchange(&option(Opt(99), &[]));
        assert_eq!(only_reply(&answer), (Opt(99), Rep::NBD_REP_ERR_UNSUP));
    }
    let error = client.sends(&option(Opt(99), &[])).unwrap_err();
    assert_eq!(error.what, "sent more than 1,000 options plus 4 for each export");
}

#[test]
fn a_handshake_may_end_after_any_message_but_not_within_an_options_data() {
    let list = option(Opt::NBD_OPT_LIST, &[]);
    let bytes = [&FLAGS, &list[..], &option(Opt::NBD_OPT_GO, &[0, 0])].concat();
    let data_begins = bytes.len() - 2;
    for len in 0..bytes.len() {
        let mut client = Client::connect(&exports());
        client.sends(&bytes[..len]).unwrap();
        let error = ProtocolError {
            what: "closed the connection in the middle of an option",
            reference: "proto.md, \"Newstyle negotiation\"",
        };
        let expected = if len >= data_begins { Err(error) } else { Ok(()) };
        assert_eq!(client.session.on_end(Instant::now()), expected, "{len} bytes");
        assert!(matches!(client.session.demand(), Demand::Close));
    }
}

#[test]
fn an_invalid_request_has_its_errno_in_every_form_and_changes_nothing() {
    let (inval, nospc) = (Errno::NBD_EINVAL, Errno::NBD_ENOSPC);
    let (read, write) = (Cmd::NBD_CMD_READ, Cmd::NBD_CMD_WRITE);
    let (flush, trim) = (Cmd::NBD_CMD_FLUSH, Cmd::NBD_CMD_TRIM);
    let table: [(&str, Cmd, u16, u64, u64, Errno); 22] = [
        ("a read from the end", read, 0, SIZE, 512, inval),
        ("a read across the end", read, 0, SIZE - 512, 1024, inval),
        ("a read near the greatest offset", read, 0, u64::MAX - 511, 512, inval),
        ("a read that wraps", read, 0, u64::MAX - 511, 1024, inval),
        ("a read of half a block", read, 0, 0, 256, inval),
        ("a read between blocks", read, 0, 1, 512, inval),
        ("a write from the end", write, 0, SIZE, 512, nospc),
        ("a write across the end", write, 0, SIZE - 512, 1024, nospc),
        ("a write that wraps", write, 0, u64::MAX - 511, 1024, nospc),
        ("a write of a few bytes", write, 0, 0, 3, inval),
        ("a write between blocks", write, 0, 100, 512, inval),
        ("zeroes across the end", Cmd::NBD_CMD_WRITE_ZEROES, 0, SIZE - 512, 1024, nospc),
        ("a trim across the end", trim, 0, SIZE - 512, 1024, inval),
        ("a hint across the end", Cmd::NBD_CMD_CACHE, 0, SIZE - 512, 1024, inval),
        ("a flush with an offset", flush, 0, 512, 0, inval),
        ("a flush with a length", flush, 0, 0, 512, inval),
        ("a status without context", Cmd::NBD_CMD_BLOCK_STATUS, 0, 0, 512, inval),
        ("a resize", Cmd::NBD_CMD_RESIZE, 0, 0, 512, inval),
        ("an unknown command", Cmd(0xffff), 0, 0, 512, inval),
        ("a flush that must not fragment", flush, CmdFlags::DF.bits(), 0, 0, inval),
        ("a trim without hole", trim, CmdFlags::NO_HOLE.bits(), 0, 512, inval),
        ("a read with an unknown flag", read, 0x8000, 0, 512, inval),
    ];
    for (what, command, flags, offset, length, errno) in table {
        for form in FORMS {
            let mut client = Client::choosing("", form);
            let payload = if command == write { vec![0xee; length as usize] } else { vec![] };
            let request = Request { flags, ..Request::new(command, offset, length) };
            let answer = client.exchange(&[request.in_form(form), payload].concat());
            assert_eq!(form.errno(&answer), errno, "{what} in {form:?}");
            assert!(client.is_blank(), "{what} in {form:?}");
            client.reads_a_block(form);
        }
    }
}

#[test]
fn a_read_only_export_passes_no_write_to_its_volume() {
    for form in FORMS {
        let mut client = Client::choosing("frozen", form);
        for command in [Cmd::NBD_CMD_WRITE, Cmd::NBD_CMD_WRITE_ZEROES, Cmd::NBD_CMD_TRIM] {
            let payload = if command == Cmd::NBD_CMD_WRITE { vec![0xee; 512] } else { vec![] };
            let request = Request::new(command, 0, 512).in_form(form);
            let answer = client.exchange(&[request, payload].concat());
            assert_eq!(form.errno(&answer), Errno::NBD_EPERM, "{command} in {form:?}");
        }
        assert_eq!(client.done, 0);
        client.reads_a_block(form);
    }
}

#[test]
fn unexpected_payload_is_skipped_and_refused_and_so_is_a_write_without_payload() {
    let flagged = CmdFlags::PAYLOAD_LEN.bits();
    for (command, flags) in [
        (Cmd::NBD_CMD_READ, flagged),
        (Cmd::NBD_CMD_FLUSH, flagged),
        (Cmd::NBD_CMD_TRIM, flagged),
        (Cmd(77), flagged),
        (Cmd::NBD_CMD_WRITE, 0),
    ] {
        let mut client = Client::choosing("", Form::Extended);
        let request = Request { flags, ..Request::new(command, 0, 512) };
        let payload = vec![0xee; if flags == 0 { 0 } else { 512 }];
        let answer = client.exchange(&[request.extended(), payload].concat());
        assert_eq!(Form::Extended.errno(&answer), Errno::NBD_EINVAL, "{command}");
        assert!(client.is_blank());
        client.reads_a_block(Form::Extended);
    }
}

#[test]
fn an_invalid_request_header_ends_only_its_own_session() {
    let read = Request::new(Cmd::NBD_CMD_READ, 0, 512);
    let magic = "sent a request with a wrong magic number";
    let payload = "sent a request with more payload than the advertised maximum";
    let long = Request::new(Cmd::NBD_CMD_WRITE, 0, (32 << 20) + 1);
    let longest = Request::new(Cmd::NBD_CMD_WRITE, 0, u64::MAX);
    let trim = Request { flags: CmdFlags::PAYLOAD_LEN.bits(), ..Request::new(Cmd::NBD_CMD_TRIM, 0, 1 << 40) };
    let (compact, extended) = ("proto.md, \"Request message\"", "extension-ext-header, \"Request message\"");
    let sizes = "proto.md, \"Size constraints\"";
    let table: [(Form, Vec<u8>, &str, &str); 8] = [
        (Form::Simple, vec![0; 28], magic, compact),
        (Form::Simple, read.extended(), magic, compact),
        (Form::Structured, option(Opt::NBD_OPT_GO, &[0; 12]), magic, compact),
        (Form::Extended, [read.compact(), vec![0; 4]].concat(), magic, extended),
        (Form::Simple, long.compact(), payload, sizes),
        (Form::Structured, long.compact(), payload, sizes),
        (Form::Extended, longest.in_form(Form::Extended), payload, sizes),
        (Form::Extended, trim.extended(), payload, sizes),
    ];
    for (form, bytes, what, reference) in table {
        let exports = exports();
        let (mut other, mut client) = (Client::connect(&exports), Client::connect(&exports));
        other.chooses("", Form::Simple);
        client.chooses("", form);
        let flush = Request::new(Cmd::NBD_CMD_FLUSH, 0, 0).in_form(form);
        assert_eq!(client.sends(&[flush, bytes].concat()), Err(ProtocolError { what, reference }));
        client.execute_io();
        assert_eq!(form.cookie(&client.sent()), COOKIE, "the earlier request is answered in {form:?}");
        other.reads_a_block(Form::Simple);
    }
}

#[test]
fn an_incomplete_write_changes_nothing() {
    for form in FORMS {
        let head = Request::new(Cmd::NBD_CMD_WRITE, 0, 512).in_form(form);
        let bytes = [&head[..], &[0xee; 512]].concat();
        for len in 0..bytes.len() {
            let mut client = Client::choosing("", form);
            assert_eq!(client.exchange(&bytes[..len]), b"");
            let error = ProtocolError {
                what: "closed the connection in the middle of a request's payload",
                reference: "proto.md, \"Terminating the transmission phase\"",
            };
            let expected = if len >= head.len() { Err(error) } else { Ok(()) };
            assert_eq!(client.session.on_end(Instant::now()), expected, "{len} bytes in {form:?}");
            client.execute_io();
            assert!(matches!(client.session.demand(), Demand::Close));
            assert!(client.is_blank(), "{len} bytes in {form:?}");
        }
    }
}

#[test]
fn an_incomplete_long_write_changes_nothing_and_releases_its_memory() {
    let head = Request::new(Cmd::NBD_CMD_WRITE, 0, 128 << 10).compact();
    for len in [0, 1, 4095, 65536, (128 << 10) - 1] {
        let mut client = Client::choosing("", Form::Simple);
        client.exchange(&head);
        assert_eq!(client.pool.out_bytes(), 128 << 10);
        client.exchange(&vec![0xee; len]);
        assert!(client.session.on_end(Instant::now()).is_err());
        client.execute_io();
        assert_eq!(client.pool.out_bytes(), 0, "{len} bytes");
        assert!(client.is_blank(), "{len} bytes");
    }
}

#[test]
fn nothing_is_processed_after_a_disconnect() {
    for form in FORMS {
        let mut client = Client::choosing("", form);
        let disc = Request::new(Cmd::NBD_CMD_DISC, u64::MAX, 0).in_form(form);
        let write = [Request::new(Cmd::NBD_CMD_WRITE, 0, 512).in_form(form), vec![0xee; 512]].concat();
        assert_eq!(client.exchange(&[disc, write].concat()), b"");
        assert!(matches!(client.session.demand(), Demand::Close));
        assert!(client.is_blank());
    }
}

#[test]
fn requests_with_equal_cookies_are_each_answered() {
    for form in FORMS {
        let mut client = Client::choosing("", form);
        let read = Request::new(Cmd::NBD_CMD_READ, 0, 512).in_form(form);
        let answer = client.exchange(&read.repeat(3));
        assert_eq!(answer.len(), 3 * (form.read_head() + 512));
    }
}

#[test]
fn unread_block_status_replies_are_bounded() {
    for form in [Form::Structured, Form::Extended] {
        let mut client = Client::greeted();
        client.exchange(&option(form.option().unwrap(), &[]));
        client.exchange(&option(Opt::NBD_OPT_SET_META_CONTEXT, &context_data("", &["base:allocation"])));
        client.continues_the_handshake();
        client.holds_io = true;
        let request = Request::new(Cmd::NBD_CMD_BLOCK_STATUS, 0, SIZE).in_form(form);
        client.sends(&request.repeat(2000)).unwrap();
        assert!(!client.held.is_empty() && matches!(client.session.demand(), Demand::Nothing));
        // The longest reply of any volume.
        let many = vec![Extent { len: 16, hole: false, zero: false }; 1 << 14];
        for io in std::mem::take(&mut client.held) {
            client
                .session
                .on_io(Completion { tag: io.tag, result: Ok(Output::Extents(many.clone())) }, Instant::now());
        }
        let queued = client.session.outbox().len();
        assert!(queued <= 65 << 20, "{queued} bytes are queued for a client that does not read");
        client.sent();
        assert!(
            matches!(client.session.demand(), Demand::Bytes(_)),
            "the session continues once the client has read"
        );
    }
}

/// nbdkit described more than was asked near 4 GiB (CVE-2025-47711), and its blocksize filter let a
/// rounded length wrap (CVE-2025-47712).
#[test]
fn block_status_describes_at_most_what_was_asked_up_to_the_greatest_lengths() {
    const LARGEST: u64 = (1 << 63) - 512;
    const COMPACT: u64 = u32::MAX as u64 - 511;
    let cases: [(u64, u64, bool); 11] = [
        (0, COMPACT, true),
        ((4 << 30) - 512, COMPACT, true),
        (LARGEST - COMPACT, COMPACT, true),
        (LARGEST - 512, 512, true),
        (0, u32::MAX.into(), false),
        (LARGEST - 512, COMPACT, false),
        (u64::MAX - 511, COMPACT, false),
        (0, LARGEST, true),
        (512, LARGEST, false),
        (0, 1 << 63, false),
        (512, u64::MAX - 511, false),
    ];
    for form in [Form::Structured, Form::Extended] {
        let volume = Arc::new(NullVolume::new(LARGEST)) as Arc<dyn Volume>;
        let (name, description) = ("disk0".into(), String::new());
        let exports = Exports::new(vec![Export { name, description, read_only: false, volume }]);
        let mut client = Client::connect(&exports);
        client.exchange(&FLAGS);
        client.exchange(&option(form.option().unwrap(), &[]));
        client.exchange(&option(Opt::NBD_OPT_SET_META_CONTEXT, &context_data("", &["base:allocation"])));
        client.continues_the_handshake();
        for (offset, length, is_valid) in cases {
            if form == Form::Structured && length > u32::MAX.into() {
                continue;
            }
            let request = Request::new(Cmd::NBD_CMD_BLOCK_STATUS, offset, length);
            let answer = client.exchange(&request.in_form(form));
            if is_valid {
                assert_eq!(form.described(&answer), length, "{length} at {offset} in {form:?}");
            } else {
                assert_eq!(form.errno(&answer), Errno::NBD_EINVAL, "{length} at {offset} in {form:?}");
            }
        }
        // A volume that describes more than it was asked, as one behind a faulty server may.
        client.holds_io = true;
        client.sends(&Request::new(Cmd::NBD_CMD_BLOCK_STATUS, 0, 1024).in_form(form)).unwrap();
        let tag = client.held.remove(0).tag;
        let extents = [512, 4 << 30, 1 << 40].map(|len| Extent { len, hole: true, zero: true }).to_vec();
        client.session.on_io(Completion { tag, result: Ok(Output::Extents(extents)) }, Instant::now());
        assert_eq!(form.described(&client.sent()), 1024, "in {form:?}");
    }
}

/// NVMe/TCP in Linux received on after a fatal error (CVE-2026-52989).
#[test]
fn what_follows_a_violation_in_the_same_segment_is_not_executed() {
    for form in FORMS {
        let write = [Request::new(Cmd::NBD_CMD_WRITE, 0, 512).in_form(form), vec![0xee; 512]].concat();
        let long = Request::new(Cmd::NBD_CMD_WRITE, 0, (32 << 20) + 512).in_form(form);
        for violation in [vec![0; 32], long] {
            let mut client = Client::choosing("", form);
            client.sends(&[violation, write.clone()].concat()).unwrap_err();
            assert!(!client.execute_io() && client.done == 0 && client.is_blank(), "{form:?}");
        }
    }
}

/// A client with its session and the volumes.
struct Client {
    session: NbdTargetSession,
    channels: Vec<Box<dyn Channel>>,
    pool: Pool,
    unread: Vec<u8>,
    /// Payload received so far for [`Demand::Place`].
    placed: Vec<u8>,
    /// Number of I/O that the volumes have executed.
    done: usize,
    /// Whether I/O is held instead of executed.
    holds_io: bool,
    held: Vec<Io>,
}

impl Client {
    fn connect(exports: &Exports) -> Client {
        let pool = Pool::new(64 << 20);
        let core = TestCore::with_pool(&pool).as_core();
        let session = NbdTargetSession::new(exports.clone(), pool.clone(), Instant::now());
        let open = |export: &Export| export.volume.open(&core, session.depth(), Waker::idle()).unwrap();
        let channels = exports.iter().map(|(_, export)| open(&export)).collect();
        let (unread, placed, held) = (vec![], vec![], vec![]);
        let mut client = Client { session, channels, pool, unread, placed, done: 0, holds_io: false, held };
        assert_eq!(client.sent(), b"NBDMAGICIHAVEOPT\0\x03");
        client
    }

    /// A client that has sent its flags.
    fn greeted() -> Client {
        let mut client = Client::connect(&exports());
        assert_eq!(client.exchange(&FLAGS), b"");
        client
    }

    /// A client in the transmission phase, which has to respect the block sizes.
    fn choosing(name: &str, form: Form) -> Client {
        let mut client = Client::connect(&exports());
        client.chooses(name, form);
        client
    }

    fn chooses(&mut self, name: &str, form: Form) {
        self.exchange(&FLAGS);
        if let Some(opt) = form.option() {
            self.exchange(&option(opt, &[]));
        }
        self.enters(Opt::NBD_OPT_GO, name);
    }

    /// Checks that the handshake still works: the client queries an export, then enters
    /// transmission.
    fn continues_the_handshake(&mut self) {
        self.enters(Opt::NBD_OPT_INFO, "disk0");
        self.enters(Opt::NBD_OPT_GO, "");
    }

    fn enters(&mut self, opt: Opt, name: &str) {
        let infos = [Info::NBD_INFO_BLOCK_SIZE.0];
        let answer = self.exchange(&option(opt, &info_data(name, &infos)));
        let end = [opt.0.to_be_bytes(), Rep::NBD_REP_ACK.0.to_be_bytes(), [0; 4]].concat();
        assert!(answer.ends_with(&end), "{opt} is acknowledged");
    }

    /// Checks that transmission still works.
    fn reads_a_block(&mut self, form: Form) {
        let answer = self.exchange(&Request::new(Cmd::NBD_CMD_READ, 512, 512).in_form(form));
        assert_eq!((form.cookie(&answer), answer.len()), (COOKIE, form.read_head() + 512));
    }

    /// Sends bytes that are no violation; returns the reply.
    fn exchange(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.sends(bytes).unwrap();
        self.sent()
    }

    fn sends(&mut self, bytes: &[u8]) -> Result<(), ProtocolError> {
        self.unread.extend(bytes);
        loop {
            match self.session.demand() {
                Demand::Bytes(least) if self.unread.len() >= least => {
                    let taken = self.session.on_bytes(&Chunk::from_slice(&self.unread), Instant::now())?;
                    self.unread.drain(..taken);
                }
                Demand::Place(list) if !self.unread.is_empty() => {
                    let here = self.unread.len().min(list.len() - self.placed.len());
                    self.placed.extend(self.unread.drain(..here));
                    if self.placed.len() == list.len() {
                        list.copy_from(&std::mem::take(&mut self.placed));
                        self.session.on_placed(Instant::now())?;
                    }
                }
                _ if self.execute_io() => {}
                _ => return Ok(()),
            }
        }
    }

    /// Executes, or holds, all I/O of the session; returns whether there was any.
    fn execute_io(&mut self) -> bool {
        let before = self.done;
        while let Some((volume, io)) = self.session.poll_io() {
            assert_eq!(self.session.begin(volume, &io, false), Ok(()), "nothing excludes it");
            if self.holds_io {
                self.held.push(io);
                continue;
            }
            let mut done = vec![];
            self.channels[volume.0 as usize].submit(io);
            self.channels[volume.0 as usize].poll(&mut done);
            done.into_iter().for_each(|done| self.session.on_io(done, Instant::now()));
            self.done += 1;
        }
        self.done > before
    }

    fn sent(&mut self) -> Vec<u8> {
        self.session.outbox().take_bytes()
    }

    /// Whether the first export is all zeroes.
    fn is_blank(&mut self) -> bool {
        let memory = SgList::one(Memory::from_heap(SIZE as usize).seg(0, SIZE as usize));
        let mut done = vec![];
        self.channels[0].submit(Io { tag: Tag(0), op: Op::Read, offset: 0, len: SIZE, data: Some(memory) });
        self.channels[0].poll(&mut done);
        let content = done.pop().unwrap().result.unwrap().into_data().to_vec();
        content.iter().all(|byte| *byte == 0)
    }
}

/// The form of messages in transmission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Simple,
    Structured,
    Extended,
}

impl Form {
    /// The option that negotiates it.
    fn option(self) -> Option<Opt> {
        match self {
            Form::Simple => None,
            Form::Structured => Some(Opt::NBD_OPT_STRUCTURED_REPLY),
            Form::Extended => Some(Opt::NBD_OPT_EXTENDED_HEADERS),
        }
    }

    /// Length of a read reply before its data, in bytes.
    fn read_head(self) -> usize {
        match self {
            Form::Simple => 16,
            Form::Structured => 28,
            Form::Extended => 40,
        }
    }

    /// The cookie of a reply, which is at the same offset in every form.
    fn cookie(self, answer: &[u8]) -> u64 {
        u64::from_be_bytes(answer[8..16].try_into().unwrap())
    }

    /// Length of all extents of a reply that consists of one block status.
    fn described(self, answer: &[u8]) -> u64 {
        assert_eq!(self.cookie(answer), COOKIE);
        let number = |bytes: &[u8]| bytes.iter().fold(0, |sum, byte| sum << 8 | u64::from(*byte));
        let (head, descriptor, of_length) = match self {
            Form::Simple => panic!("it has no block status"),
            Form::Structured => (20 + 4, 8, 4),
            Form::Extended => (32 + 8, 16, 8),
        };
        let descriptors = answer[head..].chunks_exact(descriptor);
        assert!(descriptors.len() > 0 && descriptors.remainder().is_empty(), "{answer:x?}");
        let lengths: Vec<_> = descriptors.map(|one| number(&one[..of_length])).collect();
        assert!(lengths.iter().all(|length| *length > 0), "{lengths:?}");
        lengths.iter().sum()
    }

    /// The error of a reply that consists of one error.
    fn errno(self, answer: &[u8]) -> Errno {
        assert_eq!(self.cookie(answer), COOKIE);
        let number = |at: usize| u32::from_be_bytes(answer[at..at + 4].try_into().unwrap());
        let (magic, head) = match self {
            Form::Simple => {
                assert_eq!((number(0), answer.len()), (NBD_SIMPLE_REPLY_MAGIC, 16));
                return Errno(number(4));
            }
            Form::Structured => (NBD_STRUCTURED_REPLY_MAGIC, 20),
            Form::Extended => (NBD_EXTENDED_REPLY_MAGIC, 32),
        };
        assert_eq!((number(0), number(head - 4) as usize), (magic, answer.len() - head));
        assert_eq!(answer[4..8], [0, 1, 0x80, 1], "the last chunk, and an error");
        Errno(number(head))
    }
}

#[derive(Clone, Copy)]
struct Request {
    flags: u16,
    command: Cmd,
    offset: u64,
    length: u64,
}

impl Request {
    fn new(command: Cmd, offset: u64, length: u64) -> Request {
        Request { flags: 0, command, offset, length }
    }

    fn in_form(self, form: Form) -> Vec<u8> {
        match form {
            Form::Simple | Form::Structured => self.compact(),
            Form::Extended if self.command == Cmd::NBD_CMD_WRITE => {
                Request { flags: self.flags | CmdFlags::PAYLOAD_LEN.bits(), ..self }.extended()
            }
            Form::Extended => self.extended(),
        }
    }

    fn compact(self) -> Vec<u8> {
        let length = u32::try_from(self.length).unwrap();
        [&NBD_REQUEST_MAGIC.to_be_bytes(), &self.middle()[..], &length.to_be_bytes()].concat()
    }

    fn extended(self) -> Vec<u8> {
        let magic = NBD_EXTENDED_REQUEST_MAGIC.to_be_bytes();
        [&magic, &self.middle()[..], &self.length.to_be_bytes()].concat()
    }

    fn middle(self) -> Vec<u8> {
        let (flags, command) = (self.flags.to_be_bytes(), self.command.0.to_be_bytes());
        [&flags[..], &command, &COOKIE.to_be_bytes(), &self.offset.to_be_bytes()].concat()
    }
}

fn option(opt: Opt, data: &[u8]) -> Vec<u8> {
    [&b"IHAVEOPT"[..], &opt.0.to_be_bytes(), &(data.len() as u32).to_be_bytes(), data].concat()
}

fn text(text: &str) -> Vec<u8> {
    text_of(text.len() as u32, text)
}

/// A string that claims to be `len` bytes long.
fn text_of(len: u32, text: &str) -> Vec<u8> {
    [&len.to_be_bytes(), text.as_bytes()].concat()
}

fn info_data(name: &str, infos: &[u16]) -> Vec<u8> {
    let list: Vec<u8> = infos.iter().flat_map(|info| info.to_be_bytes()).collect();
    [text(name), (infos.len() as u16).to_be_bytes().to_vec(), list].concat()
}

fn context_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let list: Vec<u8> = queries.iter().flat_map(|query| text(query)).collect();
    [text(name), (queries.len() as u32).to_be_bytes().to_vec(), list].concat()
}

/// The option and the type of a reply that consists of one message.
fn only_reply(answer: &[u8]) -> (Opt, Rep) {
    let number = |at: usize| u32::from_be_bytes(answer[at..at + 4].try_into().unwrap());
    assert_eq!(answer[..8], NBD_REP_MAGIC.to_be_bytes());
    assert_eq!(number(16) as usize, answer.len() - 20, "one reply and nothing else");
    (Opt(number(8)), Rep(number(12)))
}

/// `disk0`, writable, and `frozen`, read-only.
fn exports() -> Exports {
    let export = |name: &str, read_only| Export {
        name: name.into(),
        description: String::new(),
        read_only,
        volume: Arc::new(MemVolume::new(SIZE)) as Arc<dyn Volume>,
    };
    Exports::new(vec![export("disk0", false), export("frozen", true)])
}

const FORMS: [Form; 3] = [Form::Simple, Form::Structured, Form::Extended];
/// Fixed newstyle, and no zeroes.
const FLAGS: [u8; 4] = [0, 0, 0, 3];
const COOKIE: u64 = 0x0123_4567_89ab_cdef;
/// Size of each export, in bytes.
const SIZE: u64 = 256 << 10;
