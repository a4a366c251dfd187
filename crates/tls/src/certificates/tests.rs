//! Handshakes with valid and with invalid certificates.

use super::*;
use crate::tests::ClientAndServer;
use crate::{ClientCredentials, ServerCredentials, Tls, TlsPeer};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, date_time_ymd,
};

/// An authority that signs certificates.
struct Authority {
    pem: Vec<u8>,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new(name: &str) -> Authority {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name = named(name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem().into_bytes();
        Authority { pem, issuer: Issuer::new(params, key) }
    }

    /// Signs a certificate for these hosts, after `change` adjusted it.
    fn sign(&self, name: &str, hosts: &[&str], change: impl FnOnce(&mut CertificateParams)) -> CertifiedKey {
        let hosts: Vec<String> = hosts.iter().map(ToString::to_string).collect();
        let mut params = CertificateParams::new(hosts).unwrap();
        params.distinguished_name = named(name);
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let chain = params.signed_by(&key, &self.issuer).unwrap().pem().into_bytes();
        CertifiedKey { chain, key: key.serialize_pem().into_bytes().into() }
    }

    fn server(&self, hosts: &[&str]) -> CertifiedKey {
        self.sign("server", hosts, |params| {
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        })
    }

    fn client(&self) -> CertifiedKey {
        self.sign("backup, host", &[], |params| {
            params.distinguished_name.push(DnType::OrganizationName, "Example");
            params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        })
    }
}

fn named(name: &str) -> DistinguishedName {
    let mut names = DistinguishedName::new();
    names.push(DnType::CommonName, name);
    names
}

fn server(own: &[CertifiedKey], authorities: Option<&[u8]>) -> Tls {
    let certificates = ServerCertificates::new(own, authorities).unwrap();
    Tls::server(&ServerCredentials::Certificates(certificates)).unwrap()
}

fn client(trust: &Trust, own: Option<&CertifiedKey>, host: &str) -> Tls {
    let certificates = ClientCertificates::new(trust, own, host).unwrap();
    Tls::client(&ClientCredentials::Certificates(certificates)).unwrap()
}

/// Runs the handshake and returns the errors of both sides.
fn errors(client: Tls, server: Tls) -> [Option<String>; 2] {
    ClientAndServer::of(client, server).run().map(|(_, error)| error.map(|error| error.to_string()))
}

fn trusting(authority: &Authority) -> Trust {
    Trust::Authorities(authority.pem.clone())
}

#[test]
fn both_sides_authenticate_by_certificates() {
    let authority = Authority::new("authority");
    let hosts = ["storage.example", "*.example.net", "127.0.0.1", "::1"];
    let (own, other) = (authority.server(&hosts), authority.client());
    for host in ["storage.example", "STORAGE.example.", "a.example.net", "127.0.0.1", "::1"] {
        for (asked, presented) in [(None, None), (None, Some(&other)), (Some(&*authority.pem), Some(&other))]
        {
            let server = server(std::slice::from_ref(&own), asked);
            let mut pair = ClientAndServer::of(client(&trusting(&authority), presented, host), server);
            assert_eq!(pair.run().map(|(_, error)| error), [None, None], "{host}");
            assert_eq!(pair.client.peer(), &TlsPeer::Certificate("CN=server".into()));
            let name = "O=Example,CN=backup\\, host".to_owned();
            let expected = asked.map_or(TlsPeer::Anonymous, |_| TlsPeer::Certificate(name));
            assert_eq!(pair.server.peer(), &expected);
            pair.client.send(b"some bytes").unwrap();
            assert_eq!(pair.run()[1].0, b"some bytes");
            assert!(pair.client.can_export() && pair.client.export().is_some());
        }
    }
}

#[test]
fn certificates_from_the_same_bytes_are_equal() {
    let authority = Authority::new("authority");
    let (one, two) = (authority.server(&["a"]), authority.server(&["a"]));
    let of = |own: &CertifiedKey, authorities: Option<&[u8]>| {
        ServerCertificates::new(std::slice::from_ref(own), authorities).unwrap()
    };
    assert!(of(&one, None) == of(&one, None));
    assert!(of(&one, None) != of(&two, None));
    assert!(of(&one, None) != of(&one, Some(&authority.pem)));
}

#[test]
fn a_subject_that_is_written_differently_has_the_form_of_the_certificate() {
    for (written, expected) in [
        ("CN=admin", Some("CN=admin")),
        ("cn = admin", Some("CN=admin")),
        ("commonName=admin , o=Example\\2C Inc", Some("CN=admin,O=Example\\, Inc")),
        ("CN=a=b\"c", Some("CN=a=b\\\"c")),
        ("CN= \\ a\\  ,OU=x+OU= y", Some("CN=\\ a\\ ,OU=x+OU=y")),
        ("2.5.4.3=admin", Some("CN=admin")),
        ("2.5.4.3=#1E02 0061", None),
        ("2.5.4.3=#1E020061", Some("2.5.4.3=#1e020061")),
        ("1.2.3.4=a", Some("1.2.3.4=#0c0161")),
        ("C=DE,O=\u{c4}pfel", Some("C=DE,O=\u{c4}pfel")),
        ("", None),
        ("admin", None),
        ("=admin", None),
        ("/C=DE/CN=admin", None),
        ("CN=a,", None),
        ("nothing known=a", None),
        ("CN=a\\", Some("CN=a")),
    ] {
        assert_eq!(canonical_subject(written).as_deref(), expected, "{written}");
    }
    // What a certificate has needs no other form.
    for name in ["backup, host", " a", "a ", "#a", "a\\b", "a\u{1}b", "a;b<c>", "\u{c4}", "a=b"] {
        let mut names = named(name);
        names.push(DnType::CountryName, "DE");
        names.push(DnType::CustomDnType(vec![1, 2, 840, 113_549, 1, 9, 1]), "a@example");
        names.push(DnType::CustomDnType(vec![1, 3, 6, 1, 4, 1, 99]), "own");
        let authority = Authority::new("authority");
        let own = authority.sign(name, &[], |params| params.distinguished_name = names);
        let server = server(&[authority.server(&["a"])], Some(&authority.pem));
        let mut pair = ClientAndServer::of(client(&trusting(&authority), Some(&own), "a"), server);
        assert_eq!(pair.run().map(|(_, error)| error), [None, None]);
        let TlsPeer::Certificate(subject) = pair.server.peer() else { panic!("no certificate") };
        assert_eq!(canonical_subject(subject).as_ref(), Some(subject));
    }
}

#[test]
fn a_server_with_a_wrong_certificate_is_refused() {
    let (authority, stranger) = (Authority::new("authority"), Authority::new("stranger"));
    let good = authority.server(&["storage.example", "*.example.net", "192.0.2.1"]);
    let client_error = |own: &CertifiedKey, host: &str| {
        let server = server(std::slice::from_ref(own), None);
        let [client, server] = errors(client(&trusting(&authority), None, host), server);
        assert!(server.is_some(), "the client sends an alert");
        client.unwrap()
    };
    for host in ["other.example", "example.net", "a.b.example.net", "192.0.2.2", "::1", "storage.example.org"]
    {
        assert!(client_error(&good, host).ends_with("it is for another host name"), "{host}");
    }
    let host = ["storage.example"];
    let error = client_error(&stranger.server(&host), host[0]);
    assert!(error.ends_with("no authority that is trusted here signed it"), "{error}");
    let expired = authority.sign("server", &host, |params| params.not_after = date_time_ymd(2020, 1, 1));
    assert!(client_error(&expired, host[0]).ends_with("it has expired"));
    let early = authority.sign("server", &host, |params| params.not_before = date_time_ymd(3000, 1, 1));
    assert!(client_error(&early, host[0]).contains("it is not valid yet"));
    let of_client = authority.sign("server", &host, |params| {
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
    });
    assert!(client_error(&of_client, host[0]).contains("it is not for this use"));
}

#[test]
fn without_verification_any_server_certificate_is_accepted() {
    let own = Authority::new("stranger").server(&["other.example"]);
    let server = server(&[own], None);
    assert_eq!(errors(client(&Trust::Anybody, None, "storage.example"), server), [None, None]);
}

#[test]
fn a_client_without_a_valid_certificate_is_refused() {
    let (authority, stranger) = (Authority::new("authority"), Authority::new("stranger"));
    let own = authority.server(&["storage.example"]);
    let server_error = |presented: Option<&CertifiedKey>| {
        let server = server(std::slice::from_ref(&own), Some(&authority.pem));
        let [_, server] = errors(client(&trusting(&authority), presented, "storage.example"), server);
        server.unwrap()
    };
    assert_eq!(server_error(None), "sent no certificate, which is required here");
    assert!(server_error(Some(&stranger.client())).contains("no authority that is trusted here"));
    assert!(server_error(Some(&authority.server(&["a"]))).contains("it is not for this use"));
    let expired = authority.sign("client", &[], |params| params.not_after = date_time_ymd(2020, 1, 1));
    assert!(server_error(Some(&expired)).ends_with("it has expired"));
}

#[test]
fn the_server_name_selects_the_server_certificate() {
    let authority = Authority::new("authority");
    let own = || ["a.example", "b.example"].map(|host| authority.server(&[host]));
    for (host, has_certificate) in [("a.example", true), ("b.example", true), ("c.example", false)] {
        let [error, _] = errors(client(&trusting(&authority), None, host), server(&own(), None));
        assert_eq!(error.is_none(), has_certificate, "{host}: {error:?}");
    }
}

#[test]
fn mismatched_and_malformed_files_are_refused_with_the_cause() {
    let authority = Authority::new("authority");
    let [one, other] = [authority.server(&["a"]), authority.server(&["b"])];
    let error = |chain: &[u8], key: &[u8]| {
        let own = CertifiedKey { chain: chain.to_vec(), key: key.to_vec().into() };
        ServerCertificates::new(&[own], None).map(drop).unwrap_err().to_string()
    };
    assert!(error(&one.chain, &other.key).contains("belongs to another certificate"));
    assert!(error(b"no PEM", &one.key).contains("not a certificate or key in PEM"));
    assert!(!error(&one.chain, b"no PEM").is_empty());
    let trust = Trust::Authorities(b"no PEM".to_vec());
    assert!(ClientCertificates::new(&trust, None, "a").is_err());
}

#[test]
fn a_key_and_a_certificate_do_not_authenticate_each_other() {
    let authority = Authority::new("authority");
    let key = crate::Psk { identity: b"a".to_vec(), secret: vec![7; 32].into(), hash: crate::Hash::Sha256 };
    let with_key = || Tls::client(&ClientCredentials::Psks([key.clone()].into())).unwrap();
    let [client_error, _] = errors(with_key(), server(&[authority.server(&["a"])], None));
    assert!(client_error.unwrap().ends_with("a pre-shared key is expected here"));
    let keys = key.clone();
    let lookup: crate::Lookup = std::sync::Arc::new(move |_| Some(keys.clone()));
    let with_keys = Tls::server(&ServerCredentials::Psks(lookup)).unwrap();
    let [client_error, server_error] = errors(client(&trusting(&authority), None, "a"), with_keys);
    assert!(client_error.is_some());
    assert_eq!(server_error.unwrap(), "offered no TLS key");
}

#[test]
fn an_address_may_have_a_zone_and_a_wildcard_stands_for_one_label() {
    assert_eq!(ExpectedHost::new("fe80::1%eth0"), ExpectedHost::Address("fe80::1".parse().unwrap()));
    let host = ExpectedHost::new("a.example");
    for (name, matches) in
        [("A.Example", true), ("*.example", false), ("*.a.example", false), ("*", false), ("", false)]
    {
        assert_eq!(host.verify_host_name(name), matches, "{name}");
    }
    let host = ExpectedHost::new("a.b.example");
    assert!(host.verify_host_name("*.b.example") && !host.verify_host_name("*.example"));
}
