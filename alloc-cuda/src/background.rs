//! A thread that lets a pool cool down while its program makes no calls. It ends with the pool.

use crate::pool::Inner;
use std::sync::{Arc, Weak};
use std::time::Duration;

const PERIOD: Duration = Duration::from_millis(250);

/// Starts it; without a thread the pool cools at its calls.
pub(crate) fn start(inner: &Arc<Inner>) {
    let weak: Weak<Inner> = Arc::downgrade(inner);
    let thread = std::thread::Builder::new().name("thermalloc-cuda".to_owned());
    let run = move || {
        loop {
            std::thread::sleep(PERIOD);
            match weak.upgrade() {
                Some(inner) => inner.poll(),
                None => return,
            }
        }
    };
    drop(thread.spawn(run));
}
