//! The table as it is printed, character for character.

mod fixture;

use blockmux_lab::table::{Colour, Width, render};

#[test]
fn one_protocol_fits_eighty_columns_whole() {
    let text = render(&fixture::plain_comparison(), Width(80), Colour::Off);
    println!("{text}");
    println!("{}", render(&fixture::comparison(), Width(80), Colour::Off));
    panic!();
}
