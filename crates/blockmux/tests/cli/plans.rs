//! A plan says which sessions a reload affects and why it is refused.

use crate::program::text;
use crate::raw_client::RawClient;
use crate::reload::Configured;
use std::net::TcpStream;
use std::os::unix::fs::symlink;

#[test]
fn a_second_volume_over_a_file_that_is_served_is_refused_with_the_names_of_both() {
    let config = |more: &str| {
        format!("nbd = ['unix:a.sock']\n[[volume]]\nname = 'a'\nspec = 'file:disk.img?size=1m'\n{more}")
    };
    let volume = |name: &str, spec: &str| format!("[[volume]]\nname = '{name}'\nspec = '{spec}'\n");
    let served = Configured::serve(&config(""));
    symlink(served.socket("disk.img"), served.socket("link")).unwrap();
    let once =
        "a file is open for writing once; remove one, make both slices of it, or give one ?readonly=on\n";
    for spec in ["file:disk.img", "slice:512k,512k:file:disk.img"] {
        let refused = served.refused(&config(&volume("b", spec)));
        assert!(refused.contains("volumes `a` and `b` both write to /"), "{refused}");
        assert!(refused.ends_with(&format!("/disk.img, and {once}")), "{refused}");
        let planned = served.said(&["diff"]);
        assert!(
            planned.starts_with("+ volume b: ") && planned.contains(&format!("; refused: {once}")),
            "{planned}"
        );
    }
    // A plan does not look at the file system, which may hang, so only opening finds another name.
    let refused = served.refused(&config(&volume("b", "file:link")));
    assert!(refused.contains("volumes `a` and `b` both write to /"), "{refused}");
    assert!(refused.ends_with(&format!("/link, and {once}")), "{refused}");
    let both = volume("b", "file:new.img?size=1m") + &volume("c", "file:new.img?size=1m");
    let refused = served.refused(&config(&both));
    assert!(refused.contains("volumes `c` and `b` both write to /"), "{refused}");
    let added = served.ctl(&["add", &format!("d=file:{}", served.socket("disk.img").display())]);
    let said = text(&added.stderr);
    assert!(said.contains("volumes `a` and `d` both write to /") && said.ends_with(once), "{said}");
    let done = served.reload(&config(&volume("b", "file:disk.img?readonly=on")));
    assert!(done.starts_with("+ volume b: "), "{done}");
}

#[test]
fn a_plan_names_the_sessions_of_listeners_whose_port_the_system_has_chosen() {
    let config = |listeners: &str| {
        format!("nbd = ['unix:a.sock'{listeners}]\n[[volume]]\nname = 'a'\nspec = 'mem:1m'\n")
    };
    let served = Configured::serve(&config(", '127.0.0.1:0'"));
    let urls = served.daemon.urls_of("nbd");
    let place = urls[0].trim_start_matches("nbd://").split('/').next().unwrap();
    let mut client = RawClient::with_export(TcpStream::connect(place).unwrap(), "a");
    let done = served.reload(&config(", '127.0.0.1:0?allow=127.0.0.0/8'"));
    assert!(!done.contains("affected"), "{done}");
    assert_eq!(client.read(0, 512), [0; 512]);
    served.write(&config(""));
    let planned = served.said(&["diff"]);
    let lines: Vec<_> = planned.lines().collect();
    assert_eq!((lines[0], lines.len()), ("- nbd 127.0.0.1:0?allow=127.0.0.0/8", 2), "{planned}");
    assert!(lines[1].starts_with("    affects nbd client ") && lines[1].ends_with(" of a"), "{planned}");
    assert_eq!(served.said(&["reload"]), planned.replace("affects", "affected"));
    assert!(client.is_closed());
}
