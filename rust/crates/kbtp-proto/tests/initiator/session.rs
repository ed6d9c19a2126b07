use kbtp_proto::initiator::{Data, Ended, Operation, Session, Terms};
use kbtp_proto::types::{RequestFlag, Status, TerminateCause};
use kbtp_proto::wire::{Completion, DataDescriptor, Operation as Kind, Request};
use proptest::prelude::*;

const FIRST_HANDLE: u64 = 5000;

const TERMS: Terms = Terms {
    request_credits: 2,
    first_handle: FIRST_HANDLE,
    handle_count: 3,
    invalidate: true,
};

const BUFFER: DataDescriptor = DataDescriptor {
    stag: 0xABCD,
    to: 64,
    length: 100,
};

type Sessions = Session<&'static str>;

fn operation(kind: Kind, handle: Option<u64>, name: &'static str) -> Operation<&'static str> {
    Operation {
        kind,
        handle,
        generation: 3,
        flags: RequestFlag::empty(),
        context: name,
    }
}

/// Submit, and send at once; the request as a target reads it.
fn sent(session: &mut Sessions, one: Operation<&'static str>, data: Data) -> Request {
    session.submit(one);
    let ready = session.ready().expect("there is a credit").expect("there is a handle");
    let mut message = session.send(ready, data);
    if let Data::Inline(length_bytes) = data {
        message.extend(vec![0; length_bytes as usize]);
    }
    Request::parse(&message, message.len() as u32).expect("a well-formed request")
}

fn answer(request: &Request, status: Status) -> Completion {
    Completion {
        request_id: request.request_id,
        handle: request.handle,
        generation: 4,
        status,
        data_length: 100,
        block_offset: 8192,
    }
}

fn described(alone: bool) -> Data {
    let descriptor = BUFFER;
    Data::Described { descriptor, alone }
}

#[test]
fn a_request_says_what_the_operation_says() {
    let mut session = Sessions::new(TERMS);
    let load = sent(&mut session, operation(Kind::Load, Some(7), "load"), described(true));
    assert_eq!(
        (load.operation, load.request_id, load.handle, load.generation),
        (Kind::Load, 1, 7, 3)
    );
    assert_eq!((load.data, load.flags), (BUFFER, RequestFlag::INVALIDATE));
    let store = sent(&mut session, operation(Kind::Store, Some(8), "store"), Data::Inline(3));
    assert_eq!(
        (store.request_id, store.flags, store.inline_bytes),
        (2, RequestFlag::INLINE, 3)
    );
    assert_eq!(store.data.length, 3);
}

#[test]
fn a_region_of_the_callers_is_not_to_be_invalidated_nor_one_where_that_was_not_granted() {
    let load = sent(
        &mut Sessions::new(TERMS),
        operation(Kind::Load, Some(7), "load"),
        described(false),
    );
    assert_eq!(load.flags, RequestFlag::empty());
    let mut without = Sessions::new(Terms {
        invalidate: false,
        ..TERMS
    });
    let load = sent(&mut without, operation(Kind::Load, Some(7), "load"), described(true));
    assert_eq!(load.flags, RequestFlag::empty());
}

/// Profile 3 "Credits".
#[test]
fn no_more_requests_are_outstanding_than_there_are_credits() {
    let mut session = Sessions::new(TERMS);
    let first = sent(&mut session, operation(Kind::Free, Some(1), "a"), Data::None);
    sent(&mut session, operation(Kind::Free, Some(2), "b"), Data::None);
    session.submit(operation(Kind::Free, Some(3), "c"));
    assert!(session.ready().is_none());
    assert_eq!(session.outstanding(), 2);
    let ended = session.received(&answer(&first, Status::Success).pack()).unwrap();
    assert!(matches!(ended, Ended::Answered(Operation { context: "a", .. }, _)));
    assert_eq!(session.ready().unwrap().unwrap().operation.context, "c");
}

#[test]
fn a_handle_that_is_bound_after_all_makes_room_for_another() {
    let mut session = Sessions::new(TERMS);
    let first = sent(&mut session, operation(Kind::AllocStore, None, "a"), Data::Inline(0));
    assert_eq!(first.handle, FIRST_HANDLE);
    let again = session.received(&answer(&first, Status::AlreadyBound).pack()).unwrap();
    assert!(matches!(again, Ended::Again));
    let ready = session.ready().unwrap().unwrap();
    let message = session.send(ready, Data::Inline(0));
    let second = Request::parse(&message, message.len() as u32).unwrap();
    assert_eq!((second.handle, second.request_id), (FIRST_HANDLE + 1, 2));
}

#[test]
fn without_a_free_handle_nothing_is_sent() {
    let mut session = Sessions::new(Terms {
        handle_count: 1,
        ..TERMS
    });
    let first = sent(&mut session, operation(Kind::AllocStore, None, "a"), Data::Inline(0));
    session.submit(operation(Kind::AllocStore, None, "b"));
    assert!(matches!(
        session.ready(),
        Some(Err(Ended::NoHandle(Operation { context: "b", .. })))
    ));
    session.received(&answer(&first, Status::LengthError).pack()).unwrap();
    let second = sent(&mut session, operation(Kind::AllocStore, None, "c"), Data::Inline(0));
    assert_eq!(second.handle, FIRST_HANDLE); // nothing was bound to it
}

#[test]
fn a_request_that_is_withdrawn_costs_neither_credit_nor_handle() {
    let mut session = Sessions::new(Terms {
        handle_count: 1,
        ..TERMS
    });
    session.submit(operation(Kind::AllocStore, None, "a"));
    let ready = session.ready().unwrap().unwrap();
    assert_eq!(session.withdraw(ready).context, "a");
    assert_eq!(session.outstanding(), 0);
    assert_eq!(
        sent(&mut session, operation(Kind::AllocStore, None, "b"), Data::None).handle,
        FIRST_HANDLE
    );
}

#[test]
fn what_no_target_may_say_ends_the_stream() {
    let ask = |change: &dyn Fn(&mut Completion)| {
        let mut session = Sessions::new(TERMS);
        let load = sent(&mut session, operation(Kind::Load, Some(7), "load"), described(false));
        let mut wrong = answer(&load, Status::Success);
        change(&mut wrong);
        session.received(&wrong.pack()).unwrap_err()
    };
    for (error, said) in [
        (
            ask(&|wrong| wrong.request_id = 77),
            "Request ID 77, which is not outstanding",
        ),
        (ask(&|wrong| wrong.handle = 8), "names handle 8, asked was 7"),
        (ask(&|wrong| wrong.data_length = 101), "LOAD of 101 octets into 100"),
    ] {
        assert_eq!(error.cause, TerminateCause::RdmapUnspecified);
        assert!(error.message.contains(said), "{error}");
    }
}

#[test]
fn a_request_is_answered_once() {
    let mut session = Sessions::new(TERMS);
    let load = sent(&mut session, operation(Kind::Load, Some(7), "load"), described(false));
    let octets = answer(&load, Status::Success).pack();
    session.received(&octets).unwrap();
    assert!(session.received(&octets).is_err());
}

#[test]
fn at_the_end_everything_that_was_not_answered_comes_back() {
    let mut session = Sessions::new(TERMS);
    for name in ["a", "b"] {
        sent(&mut session, operation(Kind::Free, Some(1), name), Data::None);
    }
    session.submit(operation(Kind::Free, Some(1), "c"));
    let lost: Vec<_> = session.fail().into_iter().map(|one| one.context).collect();
    assert_eq!(lost, ["a", "b", "c"]);
    assert_eq!(session.outstanding(), 0);
}

#[test]
fn a_completion_is_40_octets_of_a_known_status() {
    let good = Completion {
        request_id: 1,
        handle: 2,
        generation: 3,
        status: Status::LengthError,
        data_length: 4,
        block_offset: 5,
    };
    assert_eq!(Completion::parse(&good.pack()), Ok(good));
    for (place, value, field) in [(0, 2, "version"), (1, 2, "opcode"), (2, 1, "flags"), (23, 16, "status")] {
        let mut octets = good.pack();
        octets[place] = value;
        assert_eq!(Completion::parse(&octets).unwrap_err().field, field);
    }
    let octets = [&good.pack()[..], &[0]].concat();
    for wrong in [&octets[..], &octets[..39], &octets[..23], &[]] {
        assert_eq!(Completion::parse(wrong).unwrap_err().field, "message");
    }
}

proptest! {
    /// Whatever comes, nothing panics and no request ends twice.
    #[test]
    fn noise_ends_nothing_twice(messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..48), 0..20)) {
        let mut session = Sessions::new(TERMS);
        sent(&mut session, operation(Kind::Load, Some(7), "load"), described(false));
        let mut ended = 0;
        for message in messages {
            ended += usize::from(matches!(session.received(&message), Ok(Ended::Answered(..))));
        }
        prop_assert_eq!(ended + session.fail().len(), 1);
    }

    #[test]
    fn completions_of_any_fields_survive_the_wire(
        request_id: u64, handle: u64, generation: u16, status in 0u16..16, data_length: u32, block_offset: u64,
    ) {
        let status = Status::from_value(status).unwrap();
        let one = Completion { request_id, handle, generation, status, data_length, block_offset };
        prop_assert_eq!(Completion::parse(&one.pack()), Ok(one));
    }
}
