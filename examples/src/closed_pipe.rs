//! What happens when the reader of a program's output goes away, as in `plan ... | head`: the program ends, quietly.
//!
//! Rust ignores SIGPIPE, and `println!` panics when nobody reads any more. To take the signal as other programs do would also end
//! ranks whose peer has closed a connection, so it is the panic that is looked at.

use std::panic::{PanicHookInfo, set_hook, take_hook};
use std::process::exit;

/// What shells report of a program that SIGPIPE has ended.
const CODE: i32 = 128 + 13;

/// From now on, a print to a pipe that nobody reads ends the process with code 141, without a message. Every program's first call.
pub fn end_quietly() {
    let before = take_hook();
    set_hook(Box::new(move |panic| {
        if is_closed_pipe(panic) {
            exit(CODE);
        }
        before(panic);
    }));
}

/// `print!` and its kin have no other way to tell.
fn is_closed_pipe(panic: &PanicHookInfo) -> bool {
    let text = panic.payload().downcast_ref::<String>();
    text.is_some_and(|t| t.starts_with("failed printing to std") && t.contains("Broken pipe"))
}
