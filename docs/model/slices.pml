/* slices.pml - slices that move between workers, and messages that find them.
 *
 *   make model             exhaustive (docs/model/run.sh)
 *   tests/project/test_slice_model.py    that, and that spin finds each of the rules broken on purpose
 *
 * NW workers, one slice, NV versions of the map, each of which gives the slice to any worker. Each
 * worker learns the versions in their order, each at its own time. Two tasks elsewhere, on workers 0
 * and 1, send a message each to the slice's second stage. So the slice runs a stage that needs no
 * message, then one that needs both.
 *
 * Envelopes overtake each other and come twice (an acknowledgement that is lost makes them so). What
 * is lost and comes again is late here. In the end a worker without the slice leaves.
 *
 * Checked: each stage runs once, with both messages, where the data is; the slice is in one place; a
 * message that goes on has a newer version than it came with; nothing goes to a worker that is gone;
 * and when nothing more can happen, both stages have run.
 *
 * Which source plays which part:
 *   Worker     clamor_ray/_recipes/placement/worker_core.py (routes, holds, departs, arrives); links.py
 *              (what comes twice); matching/matcher.py (begins, ends)
 *   learn      partition_map.py
 *   leave      farewells.py
 *
 * What is not here: several slices in one packet; decisions; checkpoints; a worker or a controller
 * that is lost (the job begins again, or the next controller learns the map).
 *
 * Rules, each with a switch that breaks it:
 *   BREAK_HOLD         what comes with a newer version of the map than ours is not held
 *   BREAK_FORWARD      what comes for a slice that is not ours stays here
 *   BREAK_VERSION      what goes on keeps the version with which it came
 *   BREAK_EARLY        what waits for a slice stays when the map gives that slice to another worker
 *   BREAK_CLOSE        what waits for a slice is not given to it when it comes
 *   BREAK_TWICE        a slice that comes twice is taken twice
 *   BREAK_COUNT        messages are counted, whoever has sent them
 *   BREAK_RUNNING      a slice goes while a task runs on it
 *   BREAK_INBOX        the messages for a slice do not go with it
 *   BREAK_STATE        what has run on a slice does not go with it
 *   BREAK_STORE        tasks may begin before the slice's data is stored
 *   BREAK_PART         a worker that leaves ends when it has nothing, whoever may send to it still
 */

#ifndef NW
#define NW 3              /* workers */
#endif
#ifndef NV
#define NV 3              /* versions 1..NV; 2 in the gate */
#endif
#define BOTH 3            /* bits: the messages */

#define AT(w, v) ((w) * (NV + 1) + (v))
#define MAIL(m, w, v) ((m) * NW * (NV + 1) + AT(w, v))
#define bit_of(m) (1 << (m))

/* ---- the controller's */
byte owner[NV + 1];       /* version -> worker */

/* ---- envelopes, by receiver and version: each is sent once */
#define NONE 0
#define FLIES 1
#define AGAIN 2           /* it has come, and comes once more */
#define CAME 3
byte mail[2 * NW * (NV + 1)];
byte parcel[NW * (NV + 1)];   /* the slice */
byte parcel_done[NW * (NV + 1)];
byte parcel_inbox[NW * (NV + 1)];

/* ---- workers */
byte version[NW] = 1;
#define AWAY 0
#define COMES 1           /* its data is not stored yet */
#define HERE 2
byte place[NW];
bit stored[NW];
byte done[NW];            /* stages that have run on the slice: it says so itself */
byte inbox[NW];           /* bits: messages that are closed */
byte count[NW];           /* closings */
byte early[NW];           /* bits: messages that wait for the slice */
byte running[NW];         /* the stage that runs; 0: none */
bit gone[NW];

/* ---- for the checks */
byte sent;                /* bits */
bit begun[3];

#define home(h) owner[version[h]]
#ifdef BREAK_COUNT
#define has_both(w) (count[w] >= 2)
#else
#define has_both(w) (inbox[w] == BOTH)
#endif
#ifdef BREAK_HOLD
#define may_come(w, v) true
#else
#define may_come(w, v) ((v) <= version[w])
#endif
#ifdef BREAK_STORE
#define is_there(w) (place[w] != AWAY)
#else
#define is_there(w) (place[w] == HERE)
#endif

byte to, at, sends_as;    /* scratch: 0 outside d_step */

inline post(what, whither, v)
{
    assert(!gone[whither]);
    at = MAIL(what, whither, v);
    if
    :: mail[at] == NONE -> mail[at] = FLIES
    :: else               /* the same, by another way */
    fi;
    at = 0
}

/* A message is at a worker, which knows its own version of the map; `came` is that of the message. */
inline route(msg, me, came)
{
    to = home(me);
    if
    :: place[me] == HERE ->
        inbox[me] = inbox[me] | bit_of(msg);
        if
        :: count[me] < 2 -> count[me]++
        :: else
        fi
#ifdef BREAK_FORWARD
    :: place[me] != HERE -> early[me] = early[me] | bit_of(msg)
#else
    :: place[me] != HERE && to == me -> early[me] = early[me] | bit_of(msg)
    :: place[me] != HERE && to != me ->
#ifdef BREAK_VERSION
        sends_as = (came == 0 -> version[me] : came);
#else
        sends_as = version[me];
#endif
        assert(came < sends_as);
        post(msg, to, sends_as);
        sends_as = 0
#endif
    fi;
    to = 0
}

inline post_slice(goal, giver)
{
    assert(!gone[goal]);
    at = AT(goal, version[giver]);
    parcel[at] = FLIES;
#ifndef BREAK_STATE
    parcel_done[at] = done[giver];
#endif
#ifndef BREAK_INBOX
    parcel_inbox[at] = inbox[giver];
#endif
    at = 0
}

inline forget_slice(who)
{
    place[who] = AWAY; stored[who] = 0; done[who] = 0; inbox[who] = 0; count[who] = 0;
    running[who] = 0
}

/* The slice has come. */
inline take_slice(taker, of_version)
{
    place[taker] = COMES;
    done[taker] = parcel_done[AT(taker, of_version)];
    inbox[taker] = parcel_inbox[AT(taker, of_version)];
    count[taker] = (inbox[taker] & 1) + (inbox[taker] >> 1);
    if
    :: home(taker) != taker -> post_slice(home(taker), taker); forget_slice(taker)
    :: else
    fi
}

#define nowhere (place[0] == AWAY && place[1] == AWAY && place[2] == AWAY)

#define is_last(w) (version[w] == NV)
#define all_know (is_last(0) && is_last(1) && is_last(2))
#define flies(x) ((x) == FLIES || (x) == AGAIN)
#define nothing_goes_to(w) \
    (!flies(mail[MAIL(0, w, 1)]) && !flies(mail[MAIL(1, w, 1)]) && !flies(parcel[AT(w, 1)]) && \
     !flies(mail[MAIL(0, w, 2)]) && !flies(mail[MAIL(1, w, 2)]) && !flies(parcel[AT(w, 2)]) && \
     !flies(mail[MAIL(0, w, NV)]) && !flies(mail[MAIL(1, w, NV)]) && !flies(parcel[AT(w, NV)]))
#define has_nothing(w) \
    (is_last(w) && owner[NV] != (w) && place[w] == AWAY && early[w] == 0 && \
     ((w) > 1 || (sent & bit_of(w))))
#ifdef BREAK_PART
#define may_end(w) has_nothing(w)
#else
#define may_end(w) (has_nothing(w) && all_know && nothing_goes_to(w))
#endif

#define receive(w, v) \
    :: d_step { \
        !gone[w] && flies(mail[MAIL(0, w, v)]) && may_come(w, v) -> \
        mail[MAIL(0, w, v)] = (mail[MAIL(0, w, v)] == FLIES -> AGAIN : CAME); \
        route(0, w, v) \
       } \
    :: d_step { \
        !gone[w] && flies(mail[MAIL(1, w, v)]) && may_come(w, v) -> \
        mail[MAIL(1, w, v)] = (mail[MAIL(1, w, v)] == FLIES -> AGAIN : CAME); \
        route(1, w, v) \
       } \
    :: d_step { \
        !gone[w] && flies(parcel[AT(w, v)]) && may_come(w, v) -> \
        if \
        :: TAKEN(w, v) -> assert(nowhere); take_slice(w, v) \
        :: else \
        fi; \
        parcel[AT(w, v)] = (parcel[AT(w, v)] == FLIES -> AGAIN : CAME) \
       }
#ifdef BREAK_TWICE
#define TAKEN(w, v) true
#else
#define TAKEN(w, v) (parcel[AT(w, v)] == FLIES)
#endif

proctype Worker(byte w)
{
end:
    do
    /* the next version of the map */
    :: d_step {
        !gone[w] && version[w] < NV ->
        version[w]++;
#ifndef BREAK_EARLY
        if
        :: home(w) != w && (early[w] & 1) -> post(0, home(w), version[w])
        :: else
        fi;
        if
        :: home(w) != w && (early[w] & 2) -> post(1, home(w), version[w])
        :: else
        fi;
        if
        :: home(w) != w -> early[w] = 0
        :: else
        fi
#endif
       }

    /* the task of this worker sends */
    :: d_step { w < 2 && !(sent & bit_of(w)) -> sent = sent | bit_of(w); route(w, w, 0) }

    receive(w, 1)
    receive(w, 2)
#if NV > 2
    receive(w, 3)
#endif

    /* the data of the slice is stored; then the slice is here, with what has waited for it */
    :: d_step {
        place[w] == COMES ->
        stored[w] = 1; place[w] = HERE;
#ifndef BREAK_CLOSE
        inbox[w] = inbox[w] | early[w];
        count[w] = (inbox[w] & 1) + (inbox[w] >> 1);
#endif
        early[w] = 0
       }

    /* stages */
    :: d_step {
        is_there(w) && home(w) == w && running[w] == 0 &&
        (done[w] == 0 || (done[w] == 1 && has_both(w))) ->
        running[w] = done[w] + 1;
        assert(stored[w]);
        assert(running[w] < 2 || inbox[w] == BOTH);
        assert(!begun[running[w]]);
        begun[running[w]] = 1
       }
    :: d_step { running[w] != 0 -> done[w] = running[w]; running[w] = 0 }

    /* the slice goes */
    :: d_step {
        place[w] == HERE && home(w) != w &&
#ifndef BREAK_RUNNING
        running[w] == 0 &&
#endif
        true ->
        post_slice(home(w), w);
        forget_slice(w)
       }

    :: d_step { !gone[w] && may_end(w) -> gone[w] = 1 }
    od
}

proctype Monitor()
{
end:
    timeout ->
    assert(begun[1] && begun[2])
}

init {
    atomic {
        owner[1] = 2;
        if
        :: owner[2] = 0
        :: owner[2] = 1
        :: owner[2] = 2
        fi;
#if NV > 2
        if
        :: owner[NV] = 0
        :: owner[NV] = 1
        :: owner[NV] = 2
        fi;
#endif
        place[owner[1]] = HERE;
        stored[owner[1]] = 1;
        run Worker(0); run Worker(1); run Worker(2); run Monitor()
    }
}
