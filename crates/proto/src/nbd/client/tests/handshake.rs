//! Tests of the handshake with correct and faulty servers.

use super::script::*;
use crate::driver::session::{Demand, Initiator, StreamSession, Timed};
use crate::nbd::client::handshake::{MAX_EXPORTS, MAX_LIST_BYTES, MAX_OPTION_REPLY};
use crate::nbd::client::{
    BlockSize, ExportInfo, HeaderFormat, ListedExport, NbdFeatures, NbdHandshakeRefusal, NbdInitiatorConfig,
    NbdInitiatorSession, NbdSessionMode, TransmissionFlags,
};
use blockmux_volume::{Chunk, Pool};
use blockmux_wire::nbd::handshake::{Opt, Rep};
use std::time::{Duration, Instant};

const ALL: NbdFeatures = NbdFeatures { extended_headers: true, structured_replies: true };
const NONE: NbdFeatures = NbdFeatures { extended_headers: false, structured_replies: false };

fn go_data() -> Vec<u8> {
    b"\0\0\0\x01x\0\x03\0\x01\0\x02\0\x03".to_vec()
}

fn meta_data(queries: u32) -> Vec<u8> {
    let query: &[u8] = if queries > 0 { b"\0\0\0\x0fbase:allocation" } else { b"" };
    [b"\0\0\0\x01x", &queries.to_be_bytes()[..], query].concat()
}

/// Answers an option and checks what is sent next.
fn step(client: &mut NbdTestClient, answer: &[u8], next: &[u8]) {
    client.feed(answer).unwrap();
    assert_eq!(client.sent(), next);
}

#[test]
fn a_modern_server_grants_everything() {
    at_every_split(|split| {
        let mut client = NbdTestClient::new(NbdSessionMode::Go, ALL, split);
        let opt = Opt::NBD_OPT_EXTENDED_HEADERS;
        step(&mut client, &greeting(3), &[&[0, 0, 0, 3][..], &option(opt, b"")].concat());
        let set = Opt::NBD_OPT_SET_META_CONTEXT;
        step(&mut client, &reply(opt, Rep::NBD_REP_ACK, b""), &option(set, &meta_data(1)));
        step(&mut client, &reply(set, Rep::NBD_REP_META_CONTEXT, b"\0\0\0\x05base:allocation"), b"");
        let go = Opt::NBD_OPT_GO;
        step(&mut client, &reply(set, Rep::NBD_REP_ACK, b""), &option(go, &go_data()));
        for info in [
            info_block_size(4096, 8192, 1 << 20),
            b"\0\x01canonical".to_vec(),
            b"\0\x02a disk".to_vec(),
            b"\x12\x34ignored".to_vec(),
            info_export(1 << 30, 0x07),
        ] {
            step(&mut client, &reply(go, Rep::NBD_REP_INFO, &info), b"");
        }
        assert!(!client.session.is_ready() && client.session.export().is_none());
        step(&mut client, &reply(go, Rep::NBD_REP_ACK, b""), b"");
        assert!(client.session.is_ready());
        let expected = ExportInfo {
            name: "canonical".into(),
            description: "a disk".into(),
            size: 1 << 30,
            flags: TransmissionFlags::from_bits_retain(7),
            block_size: Some(BlockSize { minimum: 4096, preferred: 8192, maximum_payload: 1 << 20 }),
            contexts: vec!["base:allocation".into()],
            headers: HeaderFormat::Extended,
        };
        assert_eq!(client.session.export(), Some(&expected));
        assert_eq!(client.session.export().unwrap().volume_info(), expected.volume_info());
        assert_eq!(client.session.poll_timeout(), None);
    });
}

#[test]
fn a_server_without_other_options_gets_nbd_opt_export_name() {
    at_every_split(|split| {
        let mut client = NbdTestClient::new(NbdSessionMode::Go, ALL, split);
        client.feed(&greeting(1)).unwrap();
        let no = |opt| reply(opt, Rep::NBD_REP_ERR_UNSUP, b"what?");
        assert_eq!(client.sent()[..4], [0, 0, 0, 1]);
        let (structured, go) = (Opt::NBD_OPT_STRUCTURED_REPLY, Opt::NBD_OPT_GO);
        step(&mut client, &no(Opt::NBD_OPT_EXTENDED_HEADERS), &option(structured, b""));
        step(&mut client, &no(structured), &option(go, &go_data()));
        step(&mut client, &no(go), &option(Opt::NBD_OPT_EXPORT_NAME, b"x"));
        let answer = [&info_export(512, 3)[2..], &[0; 124]].concat();
        client.feed(&answer[..133]).unwrap();
        assert!(!client.session.is_ready());
        client.feed(&answer[133..]).unwrap();
        let export = client.session.export().unwrap();
        assert_eq!((export.size, export.flags.bits(), export.headers), (512, 3, HeaderFormat::Simple));
        assert!(client.session.is_ready());
    });
}

#[test]
fn structured_replies_are_the_second_choice_and_contexts_optional() {
    let mut client = NbdTestClient::new(NbdSessionMode::Go, ALL, 1);
    client.feed(&greeting(3)).unwrap();
    client.feed(&reply(Opt::NBD_OPT_EXTENDED_HEADERS, Rep::NBD_REP_ERR_POLICY, b"")).unwrap();
    client.sent();
    let set = Opt::NBD_OPT_SET_META_CONTEXT;
    let ack = reply(Opt::NBD_OPT_STRUCTURED_REPLY, Rep::NBD_REP_ACK, b"");
    step(&mut client, &ack, &option(set, &meta_data(1)));
    client.feed(&reply(set, Rep::NBD_REP_META_CONTEXT, b"\0\0\0\x05base:allocation")).unwrap();
    let error = reply(set, Rep::NBD_REP_ERR_UNKNOWN, b"");
    step(&mut client, &error, &option(Opt::NBD_OPT_GO, &go_data()));
    client.feed(&reply(Opt::NBD_OPT_GO, Rep::NBD_REP_INFO, &info_export(512, 1))).unwrap();
    client.feed(&reply(Opt::NBD_OPT_GO, Rep::NBD_REP_ACK, b"")).unwrap();
    let export = client.session.export().unwrap();
    assert_eq!((export.headers, export.contexts.len()), (HeaderFormat::Structured, 0));
}

#[test]
fn the_handshake_that_a_kernel_client_recorded_with_nbdkit_is_followed() {
    // The server's bytes from a capture: greeting, NBD_INFO_EXPORT, acknowledgement.
    let mut client = NbdTestClient::new(NbdSessionMode::Go, NONE, 5);
    let greeting = b"\x4e\x42\x44\x4d\x41\x47\x49\x43\x49\x48\x41\x56\x45\x4f\x50\x54\x00\x03";
    let expected = [&[0, 0, 0, 3][..], &option(Opt::NBD_OPT_GO, &go_data())].concat();
    step(&mut client, greeting, &expected);
    client
        .feed(
            b"\x00\x03\xe8\x89\x04\x55\x65\xa9\x00\x00\x00\x07\x00\x00\x00\x03\x00\x00\x00\x0c\
              \x00\x00\x00\x00\x00\x00\x20\x00\x00\x00\x05\x6d\
              \x00\x03\xe8\x89\x04\x55\x65\xa9\x00\x00\x00\x07\x00\x00\x00\x01\x00\x00\x00\x00",
        )
        .unwrap();
    let export = client.session.export().unwrap();
    assert_eq!(export.size, 512 << 20);
    let names: Vec<_> = export.flags.iter_names().map(|(name, _)| name).collect();
    assert_eq!(
        names.join(" "),
        "HAS_FLAGS SEND_FLUSH SEND_FUA SEND_TRIM SEND_WRITE_ZEROES CAN_MULTI_CONN SEND_CACHE"
    );
}

#[test]
fn a_server_without_fixed_newstyle_gets_one_option() {
    at_every_split(|split| {
        let mut client = NbdTestClient::new(NbdSessionMode::Go, ALL, split);
        let name = [&[0; 4][..], &option(Opt::NBD_OPT_EXPORT_NAME, b"x")].concat();
        step(&mut client, &greeting(0), &name);
        client.feed(&[&info_export(1024, 1)[2..], &[0; 124]].concat()).unwrap();
        assert!(client.session.is_ready());
    });
    let mut client = NbdTestClient::new(NbdSessionMode::Go, ALL, usize::MAX);
    client.feed(&greeting(2)).unwrap();
    assert_eq!(client.sent()[..4], [0, 0, 0, 2]);
    client.feed(&info_export(1024, 1)[2..]).unwrap();
    assert!(client.session.is_ready(), "the reply has no zeroes, as negotiated");
}

#[test]
fn a_session_for_info_queries_everything_and_aborts() {
    at_every_split(|split| {
        let mut client = NbdTestClient::new(NbdSessionMode::Info, ALL, split);
        client.feed(&greeting(3)).unwrap();
        client.sent();
        let list = Opt::NBD_OPT_LIST_META_CONTEXT;
        let ack = reply(Opt::NBD_OPT_EXTENDED_HEADERS, Rep::NBD_REP_ACK, b"");
        step(&mut client, &ack, &option(list, &meta_data(0)));
        for context in [b"\0\0\0\0base:allocation".as_slice(), b"\0\0\0\0qemu:dirty"] {
            step(&mut client, &reply(list, Rep::NBD_REP_META_CONTEXT, context), b"");
        }
        let info = Opt::NBD_OPT_INFO;
        step(&mut client, &reply(list, Rep::NBD_REP_ACK, b""), &option(info, &go_data()));
        client.feed(&reply(info, Rep::NBD_REP_INFO, &info_export(512, 1))).unwrap();
        step(&mut client, &reply(info, Rep::NBD_REP_ACK, b""), &option(Opt::NBD_OPT_ABORT, b""));
        let export = client.session.export().unwrap();
        assert_eq!(export.contexts, ["base:allocation", "qemu:dirty"]);
        assert!(client.is_closing() && client.session.is_over() && !client.session.is_ready());
        assert_eq!(client.session.on_end(Instant::now()), Ok(()));
    });
}

#[test]
fn a_server_that_reports_size_0_is_queried_again_with_nbd_opt_go() {
    let (info, go) = (Opt::NBD_OPT_INFO, Opt::NBD_OPT_GO);
    for goes in [true, false] {
        let mut client = NbdTestClient::new(NbdSessionMode::Info, NONE, 1);
        client.feed(&greeting(3)).unwrap();
        client.feed(&reply(info, Rep::NBD_REP_INFO, &info_export(0, 1))).unwrap();
        client.sent();
        step(&mut client, &reply(info, Rep::NBD_REP_ACK, b""), &option(go, &go_data()));
        if goes {
            client.feed(&reply(go, Rep::NBD_REP_INFO, &info_export(1024, 1))).unwrap();
            client.feed(&reply(go, Rep::NBD_REP_ACK, b"")).unwrap();
            assert_eq!(requests(&client.sent())[0].0.cmd, 2);
        } else {
            let no = reply(go, Rep::NBD_REP_ERR_UNSUP, b"");
            step(&mut client, &no, &option(Opt::NBD_OPT_ABORT, b""));
        }
        assert_eq!(client.session.export().unwrap().size, if goes { 1024 } else { 0 });
        assert!(client.is_closing() && !client.session.is_ready());
    }
}

#[test]
fn info_of_an_old_server_enters_transmission_and_disconnects_at_once() {
    let mut client = NbdTestClient::new(NbdSessionMode::Info, ALL, 1);
    client.feed(&greeting(0)).unwrap();
    client.sent();
    client.feed(&[&info_export(1024, 1)[2..], &[0; 124]].concat()).unwrap();
    let sent = requests(&client.sent());
    assert_eq!((sent.len(), sent[0].0.cmd), (1, 2));
    assert_eq!(client.session.export().unwrap().size, 1024);
    assert!(client.is_closing());
}

#[test]
fn list_names_all_exports_with_their_descriptions() {
    at_every_split(|split| {
        let mut client = NbdTestClient::new(NbdSessionMode::List, ALL, split);
        let list = Opt::NBD_OPT_LIST;
        step(&mut client, &greeting(3), &[&[0, 0, 0, 3][..], &option(list, b"")].concat());
        for entry in [b"\0\0\0\x02d0".as_slice(), b"\0\0\0\x01xspare disk"] {
            client.feed(&reply(list, Rep::NBD_REP_SERVER, entry)).unwrap();
        }
        step(&mut client, &reply(list, Rep::NBD_REP_ACK, b""), &option(Opt::NBD_OPT_ABORT, b""));
        let listed = |name: &str, text: &str| ListedExport { name: name.into(), description: text.into() };
        assert_eq!(client.session.exports(), [listed("d0", ""), listed("x", "spare disk")]);
        assert!(client.is_closing() && client.session.refusal().is_none());
    });
}

#[test]
fn a_list_without_end_is_cut_off() {
    let list = Opt::NBD_OPT_LIST;
    for (name_len, kept) in [(1_usize, MAX_EXPORTS), (4000, MAX_LIST_BYTES / 4000)] {
        let mut client = NbdTestClient::new(NbdSessionMode::List, ALL, usize::MAX);
        client.feed(&greeting(3)).unwrap();
        let entry = [&(name_len as u32).to_be_bytes()[..], &vec![b'n'; name_len]].concat();
        let entry = reply(list, Rep::NBD_REP_SERVER, &entry);
        for _ in 0..kept + 5 {
            client.feed(&entry).unwrap();
        }
        client.feed(&reply(list, Rep::NBD_REP_ACK, b"")).unwrap();
        assert_eq!((client.session.exports().len(), client.session.exports_left_out()), (kept, 5));
    }
}

#[test]
fn a_refusal_is_distinguished_from_a_protocol_violation() {
    let go = Opt::NBD_OPT_GO;
    for (rep, line) in [
        (Rep::NBD_REP_ERR_UNKNOWN, "server has no export \"x\": sorry"),
        (Rep::NBD_REP_ERR_TLS_REQD, "server requires TLS for export \"x\": sorry"),
        (Rep::NBD_REP_ERR_POLICY, "server refused NBD_OPT_GO with NBD_REP_ERR_POLICY: sorry"),
        (Rep(0x8000_1234), "server refused NBD_OPT_GO with Rep(0x80001234): sorry"),
    ] {
        let mut client = NbdTestClient::new(NbdSessionMode::Go, NONE, 3);
        client.feed(&greeting(3)).unwrap();
        client.sent();
        step(&mut client, &reply(go, rep, b"sorry"), &option(Opt::NBD_OPT_ABORT, b""));
        let refusal = client.session.refusal().unwrap();
        assert_eq!((refusal.to_string().as_str(), refusal.reply()), (line, Some(rep)));
        assert!(client.is_closing() && !client.session.is_ready());
    }
}

#[test]
fn a_server_that_requires_tls_is_reported_at_the_first_option() {
    for mode in [NbdSessionMode::Go, NbdSessionMode::Info, NbdSessionMode::List] {
        let mut client = NbdTestClient::new(mode, ALL, 1);
        client.feed(&greeting(3)).unwrap();
        let first =
            if mode == NbdSessionMode::List { Opt::NBD_OPT_LIST } else { Opt::NBD_OPT_EXTENDED_HEADERS };
        client.feed(&reply(first, Rep::NBD_REP_ERR_TLS_REQD, b"")).unwrap();
        assert_eq!(client.session.refusal().unwrap().reply(), Some(Rep::NBD_REP_ERR_TLS_REQD));
    }
}

#[test]
fn features_missing_in_old_servers_are_reported_in_one_line() {
    let mut oldstyle = NbdTestClient::new(NbdSessionMode::Go, ALL, 1);
    oldstyle.feed(b"NBDMAGIC\x00\x00\x42\x02\x81\x86\x12\x53\0\0").unwrap();
    assert_eq!(oldstyle.session.refusal(), Some(&NbdHandshakeRefusal::Oldstyle));
    assert!(oldstyle.is_closing() && oldstyle.sent().is_empty());

    let mut unlisted = NbdTestClient::new(NbdSessionMode::List, ALL, 1);
    unlisted.feed(&greeting(0)).unwrap();
    assert_eq!(unlisted.session.refusal(), Some(&NbdHandshakeRefusal::CannotList));

    let mut closed = NbdTestClient::new(NbdSessionMode::Go, ALL, 1);
    closed.feed(&greeting(0)).unwrap();
    assert_eq!(closed.session.on_end(Instant::now()), Ok(()));
    assert_eq!(closed.session.refusal(), Some(&NbdHandshakeRefusal::Closed { export: "x".into() }));
}

#[test]
fn each_violation_in_the_handshake_is_reported() {
    let go = Opt::NBD_OPT_GO;
    let info = |data: &[u8]| reply(go, Rep::NBD_REP_INFO, data);
    let mut wrong_magic = reply(go, Rep::NBD_REP_ACK, b"");
    wrong_magic[7] ^= 1;
    let mut oversize = reply(go, Rep::NBD_REP_INFO, b"");
    oversize[16..20].copy_from_slice(&(MAX_OPTION_REPLY as u32 + 1).to_be_bytes());
    let long = [&[0, 1][..], &[b'a'; 4097]].concat();
    for (bytes, what) in [
        (wrong_magic, "sent an option reply with a wrong magic number"),
        (oversize, "sent an option reply of more than 64 KiB"),
        (reply(Opt::NBD_OPT_LIST, Rep::NBD_REP_ACK, b""), "answered an option that was not the last"),
        (reply(go, Rep::NBD_REP_SERVER, b""), "answered an option with a reply that does not belong"),
        (reply(go, Rep(77), b""), "answered an option with a reply that does not belong"),
        (reply(go, Rep::NBD_REP_ACK, b""), "described an export without its size"),
        (info(b"\0"), "sent an information reply shorter than its type"),
        (info(&info_export(1, 1)[..11]), "sent an NBD_INFO_EXPORT that is not 12 bytes long"),
        (info(&[&info_export(1, 1)[..], &[0]].concat()), "sent an NBD_INFO_EXPORT that is not 12"),
        (info(&info_block_size(1, 512, 4096)[..13]), "sent an NBD_INFO_BLOCK_SIZE that is not 14"),
        (info(&info_block_size(0, 512, 4096)), "advertised a minimum block size"),
        (info(b"\0\x01\xff"), "sent a string that is not UTF-8"),
        (info(&long), "sent a string of more than 4096 bytes"),
    ] {
        for split in [1, usize::MAX] {
            let mut client = NbdTestClient::new(NbdSessionMode::Go, NONE, split);
            client.feed(&greeting(3)).unwrap();
            let error = client.feed(&bytes).unwrap_err();
            assert!(error.what.starts_with(what), "{error}");
            assert!(error.reference.starts_with("proto.md"));
        }
    }
}

#[test]
fn broken_lists_contexts_and_greetings_are_refused() {
    let error = |mode, trace: &[Vec<u8>]| {
        let mut client = NbdTestClient::new(mode, ALL, usize::MAX);
        trace.iter().find_map(|bytes| client.feed(bytes).err()).expect("an error").what
    };
    let server = |data: &[u8]| reply(Opt::NBD_OPT_LIST, Rep::NBD_REP_SERVER, data);
    let longer = "listed an export whose name is longer than the reply";
    assert_eq!(error(NbdSessionMode::List, &[greeting(3), server(b"\0\0\0\x02x")]), longer);
    assert_eq!(error(NbdSessionMode::List, &[greeting(3), server(b"\0\0")]), longer);
    assert_eq!(error(NbdSessionMode::List, &[greeting(3), server(b"\xff\xff\xff\xffx")]), longer);

    let agreed = [greeting(3), reply(Opt::NBD_OPT_EXTENDED_HEADERS, Rep::NBD_REP_ACK, b"")];
    let context = |data: &[u8]| reply(Opt::NBD_OPT_SET_META_CONTEXT, Rep::NBD_REP_META_CONTEXT, data);
    let unasked = [&agreed[..], &[context(b"\0\0\0\x01qemu:x")]].concat();
    assert!(
        error(NbdSessionMode::Go, &unasked).starts_with("selected a metadata context that was not requested")
    );
    let twice = vec![context(b"\0\0\0\x01base:allocation"); 2];
    assert!(error(NbdSessionMode::Go, &[&agreed[..], &twice].concat()).ends_with("or selected one twice"));
    let short = [&agreed[..], &[context(b"\0\0\0")]].concat();
    assert_eq!(error(NbdSessionMode::Go, &short), "sent a metadata context shorter than its number");
    let done = reply(Opt::NBD_OPT_SET_META_CONTEXT, Rep::NBD_REP_ACK, b"");
    let unsup = reply(Opt::NBD_OPT_GO, Rep::NBD_REP_ERR_UNSUP, b"");
    assert_eq!(
        error(NbdSessionMode::Go, &[&agreed[..], &[done, unsup]].concat()),
        "agreed to extended headers but does not know NBD_OPT_GO"
    );

    let ssh = b"SSH-2.0-OpenSSH_9.2p1 Debian".to_vec();
    assert_eq!(error(NbdSessionMode::Go, &[ssh]), "is no NBD server: its first bytes are not NBDMAGIC");
    let neither = b"NBDMAGICIHAVENOT\0\x03".to_vec();
    assert_eq!(error(NbdSessionMode::Go, &[neither]), "sent neither IHAVEOPT nor the oldstyle magic");
}

#[test]
fn a_server_that_disconnects_or_stays_silent_is_an_error() {
    let mut client = NbdTestClient::new(NbdSessionMode::Go, ALL, 1);
    assert_eq!(
        client.session.on_end(Instant::now()).unwrap_err().what,
        "closed the connection without a greeting"
    );
    client.feed(&greeting(3)).unwrap();
    assert_eq!(
        client.session.on_end(Instant::now()).unwrap_err().what,
        "closed the connection instead of answering an option"
    );

    let config = NbdInitiatorConfig { export: String::new(), mode: NbdSessionMode::Go, features: ALL };
    let now = Instant::now();
    let mut session = NbdInitiatorSession::new(config, Pool::new(0), now);
    let deadline = session.poll_timeout().unwrap();
    assert_eq!(deadline - now, Duration::from_secs(30));
    assert_eq!(session.on_timeout(deadline - Duration::from_millis(1)), Ok(()));
    assert!(session.on_timeout(deadline).is_err());
}

#[test]
fn stopping_in_the_handshake_aborts_before_the_next_option() {
    let mut client = NbdTestClient::new(NbdSessionMode::Go, ALL, 1);
    client.feed(&greeting(3)).unwrap();
    client.sent();
    client.session.on_stop();
    let answer = reply(Opt::NBD_OPT_EXTENDED_HEADERS, Rep::NBD_REP_ACK, b"");
    step(&mut client, &answer, &option(Opt::NBD_OPT_ABORT, b""));
    assert!(client.is_closing() && client.session.is_over());

    let mut late = NbdTestClient::new(NbdSessionMode::Go, NONE, 1);
    late.feed(&greeting(3)).unwrap();
    late.sent();
    late.session.on_stop();
    late.feed(&reply(Opt::NBD_OPT_GO, Rep::NBD_REP_INFO, &info_export(512, 1))).unwrap();
    late.feed(&reply(Opt::NBD_OPT_GO, Rep::NBD_REP_ACK, b"")).unwrap();
    assert_eq!(requests(&late.sent())[0].0.cmd, 2, "the client sends NBD_CMD_DISC in transmission");
    assert!(late.is_closing() && late.session.room() == 0);
}

#[test]
fn a_demand_names_what_the_next_message_needs() {
    let config = NbdInitiatorConfig { export: "x".into(), mode: NbdSessionMode::Go, features: NONE };
    let mut session = NbdInitiatorSession::new(config, Pool::new(0), Instant::now());
    let demands = |session: &NbdInitiatorSession| match session.demand() {
        Demand::Bytes(least) => least,
        other => panic!("{other:?}"),
    };
    assert_eq!(demands(&session), 18);
    assert_eq!(session.on_bytes(&Chunk::from_slice(&greeting(3)), Instant::now()), Ok(18));
    assert_eq!(demands(&session), 20);
    let info = reply(Opt::NBD_OPT_GO, Rep::NBD_REP_INFO, &info_export(512, 1));
    assert_eq!(session.on_bytes(&Chunk::from_slice(&info[..20]), Instant::now()), Ok(0));
    assert_eq!(demands(&session), 32);
}

/// libnbd returned such sizes as negative numbers, which are errors (CVE-2023-5215).
#[test]
fn an_export_larger_than_i64_is_read_up_to_its_end() {
    for size in [1 << 63, (1 << 63) + 512, u64::MAX - 511] {
        let mut client = NbdTestClient::new(NbdSessionMode::Go, NONE, usize::MAX);
        client.feed(&greeting(3)).unwrap();
        client.feed(&reply(Opt::NBD_OPT_GO, Rep::NBD_REP_INFO, &info_export(size, 1))).unwrap();
        client.feed(&reply(Opt::NBD_OPT_GO, Rep::NBD_REP_ACK, b"")).unwrap();
        client.sent();
        assert_eq!(client.session.export().unwrap().volume_info().size, size);
        client.read(1, size - 512, 512);
        let [(request, _)] = requests(&client.sent()).try_into().unwrap();
        assert_eq!((request.offset, request.len), (size - 512, 512));
    }
}
