//! A client and a server connected to each other, and bytes that are not TLS.

use super::*;

fn psk(identity: &str, fill: u8, hash: Hash) -> Psk {
    let len = if hash == Hash::Sha256 { 32 } else { 48 };
    Psk { identity: identity.into(), secret: vec![fill; len].into(), hash }
}

fn client(keys: &[Psk]) -> Tls {
    Tls::client(&ClientCredentials::Psks(keys.into())).unwrap()
}

fn server(keys: Vec<Psk>) -> Tls {
    let lookup = move |identity: &[u8]| keys.iter().find(|key| key.identity == identity).cloned();
    Tls::server(&ServerCredentials::Psks(Arc::new(lookup))).unwrap()
}

/// A client and a server connected to each other.
pub(crate) struct ClientAndServer {
    pub(crate) client: Tls,
    pub(crate) server: Tls,
    /// Bytes delivered at a time.
    step: usize,
}

impl ClientAndServer {
    fn new(offered: &[Psk], known: Vec<Psk>) -> ClientAndServer {
        ClientAndServer::of(client(offered), server(known))
    }

    pub(crate) fn of(client: Tls, server: Tls) -> ClientAndServer {
        ClientAndServer { client, server, step: usize::MAX }
    }

    /// Delivers bytes until neither side sends any. Returns the plain bytes and the error of the
    /// client and of the server.
    pub(crate) fn run(&mut self) -> [(Vec<u8>, Option<TlsError>); 2] {
        let mut got = [(Vec::new(), None), (Vec::new(), None)];
        if !self.client.is_open() {
            self.client.receive(&[], &mut []).unwrap();
        }
        loop {
            let to_server = std::mem::take(self.client.output());
            let to_client = std::mem::take(self.server.output());
            if to_server.is_empty() && to_client.is_empty() {
                return got;
            }
            let [client, server] = &mut got;
            deliver(&to_server, self.step, &mut self.server, server);
            deliver(&to_client, self.step, &mut self.client, client);
        }
    }
}

fn deliver(bytes: &[u8], step: usize, to: &mut Tls, got: &mut (Vec<u8>, Option<TlsError>)) {
    let mut plain = [0; 1000];
    for part in bytes.chunks(step.min(bytes.len().max(1))) {
        let mut at = 0;
        while got.1.is_none() {
            match to.receive(&part[at..], &mut plain) {
                Ok(moved) => {
                    at += moved.taken;
                    got.0.extend(&plain[..moved.given]);
                    if moved == ReceivedBytes::default() || to.has_ended() {
                        break;
                    }
                }
                Err(error) => got.1 = Some(error),
            }
        }
    }
}

/// OpenSSL chooses the suite before the key, and passes over keys of another suite.
#[test]
fn a_client_with_keys_of_sha_384_offers_only_their_suite() {
    let suites = |hashes: &[Hash]| {
        let keys: Vec<Psk> = hashes.iter().zip(["a", "b"]).map(|(hash, name)| psk(name, 7, *hash)).collect();
        let mut client = client(&keys);
        client.receive(&[], &mut []).unwrap();
        // Record and handshake headers, version and random; then the session ID and the suites.
        let hello = client.output().split_off(5 + 4 + 2 + 32);
        let suites = 1 + usize::from(hello[0]);
        let len = usize::from(u16::from_be_bytes([hello[suites], hello[suites + 1]]));
        let suites = hello[suites + 2..][..len].chunks(2);
        suites.map(|suite| u16::from_be_bytes([suite[0], suite[1]])).collect::<Vec<_>>()
    };
    const AES_128: u16 = 0x1301;
    const AES_256: u16 = 0x1302;
    let [only, short, mixed] =
        [&[Hash::Sha384; 2][..], &[Hash::Sha256], &[Hash::Sha384, Hash::Sha256]].map(suites);
    assert!(only.contains(&AES_256) && !only.contains(&AES_128), "{only:x?}");
    for suites in [short, mixed] {
        assert!(suites.contains(&AES_256) && suites.contains(&AES_128), "{suites:x?}");
    }
}

#[test]
fn data_arrives_however_the_stream_is_split() {
    for hash in [Hash::Sha256, Hash::Sha384] {
        for step in [1, 2, 3, 5, 6, 17, 1000, usize::MAX] {
            let mut pair = ClientAndServer::new(&[psk("a key", 7, hash)], vec![psk("a key", 7, hash)]);
            pair.step = step;
            let got = pair.run();
            assert_eq!(got, [(vec![], None), (vec![], None)], "{hash:?} {step}");
            assert!(pair.client.is_open() && pair.server.is_open());
            let key = TlsPeer::Psk(b"a key".to_vec());
            assert_eq!((pair.client.peer(), pair.server.peer()), (&key, &key));
            let long: Vec<u8> = (0..40_000u32).map(|at| (at % 251) as u8).collect();
            pair.client.send(b"to the server").unwrap();
            pair.server.send(&long).unwrap();
            let [client, server] = pair.run();
            assert_eq!((server.0.as_slice(), server.1), (&b"to the server"[..], None));
            assert!(client.0 == long && client.1.is_none());
            pair.client.shrink();
            pair.server.close();
            pair.run();
            assert!(pair.client.has_ended());
        }
    }
}

#[test]
fn the_first_key_that_the_server_knows_is_selected() {
    let offered = [psk("new", 1, Hash::Sha384), psk("old", 2, Hash::Sha256)];
    for (known, name) in [(offered.to_vec(), "new"), (vec![offered[1].clone()], "old")] {
        let mut pair = ClientAndServer::new(&offered, known);
        assert_eq!(pair.run().map(|got| got.1), [None, None]);
        let key = TlsPeer::Psk(name.as_bytes().to_vec());
        assert_eq!((pair.client.peer(), pair.server.peer()), (&key, &key));
    }
}

#[test]
fn both_sides_report_an_unknown_or_different_key() {
    let offered = psk("key\n1", 1, Hash::Sha256);
    let [client, server] =
        ClientAndServer::new(std::slice::from_ref(&offered), vec![]).run().map(|got| got.1.unwrap());
    assert_eq!(server, TlsError::UnknownIdentity("key\\n1".into()));
    assert!(client.to_string().contains("unknown_psk_identity: it does not know the key"), "{client}");
    let [client, server] = ClientAndServer::new(&[offered], vec![psk("key\n1", 2, Hash::Sha256)])
        .run()
        .map(|got| got.1.unwrap());
    assert_eq!(server, TlsError::WrongKey("key\\n1".into()));
    assert!(client.to_string().contains("decrypt_error: it has a different key"), "{client}");
}

#[test]
fn bytes_that_are_not_tls_never_complete_a_handshake() {
    let hostile: [&[u8]; 5] = [
        &[0; 128],
        &[0xff; 128],
        b"GET / HTTP/1.1\r\n\r\n",
        &[22, 3, 1, 0xff, 0xff, 1, 0, 0, 0],
        &[22, 3, 1, 0, 5, 1, 0xff, 0xff, 0xff, 0],
    ];
    for bytes in hostile {
        let mut server = server(vec![]);
        let result = server.receive(bytes, &mut [0; 100]);
        assert!(
            !server.is_open()
                && (result.is_err() || result == Ok(ReceivedBytes { taken: bytes.len(), given: 0 }))
        );
    }
    // Corrupt each byte of a handshake, then of a record.
    let key = psk("a key", 7, Hash::Sha256);
    let mut client = client(std::slice::from_ref(&key));
    client.receive(&[], &mut []).unwrap();
    let hello = std::mem::take(client.output());
    for at in 0..hello.len() {
        let mut spoilt = hello.clone();
        spoilt[at] ^= 0x41;
        let mut server = server(vec![key.clone()]);
        let _ = server.receive(&spoilt, &mut []);
        assert!(!server.is_open());
    }
    for at in 0..60 {
        let mut pair = ClientAndServer::new(std::slice::from_ref(&key), vec![key.clone()]);
        pair.run();
        pair.client.send(b"some bytes").unwrap();
        let mut record = std::mem::take(pair.client.output());
        let last = record.len() - 1;
        record[at.min(last)] ^= 0x41;
        let mut plain = [0; 100];
        let result = pair.server.receive(&record, &mut plain);
        assert!(!matches!(result, Ok(ReceivedBytes { given: 1.., .. })), "{at}");
    }
}

#[test]
fn an_endless_handshake_fails() {
    let mut server = server(vec![]);
    // Records of one byte each, of a handshake message with the largest length that is accepted.
    let mut bytes = vec![22, 3, 1, 0, 4, 1, 0, 0xf0, 0];
    for _ in 0..MAX_HANDSHAKE {
        bytes.extend([22, 3, 3, 0, 1, 0]);
    }
    let mut at = 0;
    let error = loop {
        match server.receive(&bytes[at..(at + 100).min(bytes.len())], &mut []) {
            Ok(moved) => at += moved.taken,
            Err(error) => break error,
        }
        assert!(at < 2 * MAX_HANDSHAKE);
    };
    assert!(matches!(error, TlsError::Malformed(_)), "{error}");
}

#[test]
fn a_key_is_not_shown() {
    assert_eq!(format!("{:?}", psk("name", 0x41, Hash::Sha256)), "Psk name");
}

/// Exchanges records between the library and a record layer that uses exported keys.
fn exchange(
    pair: &mut ClientAndServer,
    exporter: fn(&mut ClientAndServer) -> &mut Tls,
    other: fn(&mut ClientAndServer) -> &mut Tls,
) {
    let exported = exporter(pair).export().unwrap();
    assert!(exporter(pair).export().is_none(), "keys are exported once");
    other(pair).send(b"from the library").unwrap();
    let record = std::mem::take(other(pair).output());
    let opened = Records::new(&exported.receiving.keys(exported.next_received)).open(&record);
    assert_eq!(opened, Some((APPLICATION_DATA, b"from the library".to_vec())));
    let record =
        Records::new(&exported.sending.keys(exported.next_sent)).seal(APPLICATION_DATA, b"and to it");
    let mut plain = [0; 100];
    let moved = other(pair).receive(&record, &mut plain).unwrap();
    assert_eq!((moved.taken, &plain[..moved.given]), (record.len(), &b"and to it"[..]));
}

#[test]
fn exported_keys_continue_the_connection() {
    for hash in [Hash::Sha256, Hash::Sha384] {
        for sent_before in [0, 1, 5] {
            let key = psk("a key", 7, hash);
            let open = || {
                let mut pair = ClientAndServer::new(std::slice::from_ref(&key), vec![key.clone()]);
                pair.run();
                for _ in 0..sent_before {
                    pair.client.send(b"some bytes").unwrap();
                    pair.server.send(b"others").unwrap();
                    pair.server.send(b"others").unwrap();
                }
                pair.run();
                pair
            };
            exchange(&mut open(), |pair| &mut pair.client, |pair| &mut pair.server);
            exchange(&mut open(), |pair| &mut pair.server, |pair| &mut pair.client);
        }
    }
}

#[test]
fn keys_are_exported_only_between_records_and_can_be_taken_back() {
    let key = psk("a key", 7, Hash::Sha384);
    let mut pair = ClientAndServer::new(std::slice::from_ref(&key), vec![key.clone()]);
    assert!(pair.client.export().is_none() && pair.server.export().is_none(), "the handshake is not done");
    pair.run();
    pair.server.send(&[7; 100]).unwrap();
    assert!(pair.server.export().is_none(), "output is pending");
    let record = std::mem::take(pair.server.output());
    let mut plain = [0; 60];
    for part in [&record[..3], &record[3..50]] {
        pair.client.receive(part, &mut plain).unwrap();
        assert!(pair.client.export().is_none(), "a record is incomplete");
    }
    let moved = pair.client.receive(&record[50..], &mut plain).unwrap();
    assert_eq!(moved.given, 60);
    assert!(pair.client.export().is_none(), "decrypted data is pending");
    assert_eq!(pair.client.receive(&[], &mut plain).unwrap().given, 40);
    for _ in 0..2 {
        let exported = [pair.client.export().unwrap(), pair.server.export().unwrap()];
        pair.client.resume(&exported[0]).unwrap();
        pair.server.resume(&exported[1]).unwrap();
        pair.client.send(b"again").unwrap();
        pair.server.send(b"and again").unwrap();
        let got = pair.run();
        assert_eq!(got, [(b"and again".to_vec(), None), (b"again".to_vec(), None)]);
    }
    pair.client.close();
    pair.run();
    assert!(pair.server.has_ended());
}
