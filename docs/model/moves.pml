/* moves.pml - a home moves from server to server, while a writer commits and readers read.
 *
 *   make model             the two runs below, each exhaustive (docs/model/run.sh)
 *   tests/project/test_move_model.py
 *                          those, and that spin finds each of the rules broken on purpose
 *
 * One region of NB blocks, the registry with its journal, two page servers with their keepers, a
 * writer that makes NC commits, and readers. The region goes to and fro: who gives may take the
 * next time. The registry and the page servers may be killed and started again between any two
 * steps. Each page server may be lost for good. A move may end at any step before the journal is
 * written: it is cancelled, there is no room, or no answer in time. What was said of the home of a
 * term may be heard at any time after that: late, twice, after a restart, in any order.
 *
 * The content of a block is the number of the commit that last wrote it (0: the put). The commits
 * are made one after the other, so version n is what commit n made. Checked in every state:
 *   - A decided version is at the home that the journal names, or at the giver that has not heard
 *     yet, as long as one of the two lives. It is there after a restart too.
 *   - Who takes itself for the home is the home of that term. It becomes the home only when the
 *     journal says so, or when it was the home and has not heard of a later one.
 *   - A commit is decided only when nobody has to hear of a home any more. No other server takes
 *     itself for the home then, but one that was killed before its keeper had heard that its home
 *     has left.
 *   - A home answers with the bytes of the version that it says.
 *
 * Two runs:
 *   (nothing)   all that may go wrong, without an end
 *   CALM        from any moment on nothing more goes wrong. Then commits are released, in every run
 *
 * Which source plays which part:
 *   Registry    actors/moves/moves.py and switches.py; actors/commits/held_commits.py (commits that
 *               wait); actors/lost_homes/unheard_homes.py (lookups that wait for the new home)
 *   Server      actors/page_server/moved_homes.py (attempts) and page_server.py (rehome); in
 *               pagecache_c/engine/store/: move.c, rebuild.c and definitions.c (terms, what is
 *               prepared, what leaves)
 *   Writer      actors/commits/commits.py
 *
 * What is not here: how a home applies a commit, and its history (versions.pml); several regions;
 * a rebuild from what other nodes have read. Where all is lost nothing more is promised.
 *
 * Until a taker has heard that it is the home it may turn out to have nothing: after a restart it
 * knows what is sealed by no number, so the late end of an earlier attempt drops that. Then the
 * giver must live. Two things are taken as given. The keeper hears of what was dropped or has left
 * before the next attempt begins on that server. And a taker asks what became of a sealed attempt
 * so long after the seal that the registry has written the journal by then, or never will
 * (SILENCE_S in moved_homes.py, HOLD_S in moves.py).
 *
 * Rules, each with a switch that breaks it:
 *   BREAK_SEAL         the journal is written before the taker has sealed
 *   BREAK_HOLD         commits are not held back in the last step
 *   BREAK_RELEASE      commits go on when the journal is written, and not when both have heard
 *   BREAK_RECHECK      a commit that has waited is decided though its layer is at the giver
 *   BREAK_CATCH_UP     blocks that were changed after they were carried are not carried again
 *   BREAK_ATTEMPT      a taker that was restarted goes on with what comes from then on
 *   BREAK_FREE         the giver frees its home when the journal is written, not when it has heard
 *   BREAK_ORDER        the giver is told before the taker
 *   BREAK_FORGET       a restarted registry does not know of moves that had not ended
 *   BREAK_GIVE_BACK    a restarted registry does not know who must hear that it is the home again
 *   BREAK_TERM         what is said of an earlier home is heard
 *   BREAK_PREPARED     what is prepared for a term becomes the home in an earlier one
 *   BREAK_KEPT_HOME    the giver is told before the taker's keeper has heard that this is the home
 *   BREAK_KEPT_TERM    commits go on before the keeper of who is the home again has heard the term
 *   BREAK_LOOK         who tells a server waits for its answer though it is lost (CALM finds it)
 */

#define NC 2              /* commits; versions 0..NC */
#define TERMS 3           /* there and back; each may be given back, so there is one more */
#define NB 2              /* blocks */
#define NOBODY 2
#define ABSENT 7          /* a block that was not carried */

#define bit_of(i) (1 << (i))

/* Commit 1 writes block 0, commit 2 writes block 1. */
#define TRUTH(v, b) ((b) == 0 -> ((v) >= 1 -> 1 : 0) : ((v) >= 2 -> 2 : 0))
#define CHANGED(from, to) \
    (((from) < 1 && (to) >= 1 -> 1 : 0) | ((from) < 2 && (to) >= 2 -> 2 : 0))

/* ---- registry: its journal */
byte home = 0;
byte term = 1;
byte giver = NOBODY;      /* may not have heard that it is the home no more, or is it again */
byte newest = 0;          /* version */
/* ---- registry: dies with it */
mtype = { RESTS, COPIES, LAST, WRITES_IT, TELLS_TAKER, TELLS_GIVER, GIVES_BACK };
mtype move = RESTS;
byte at;                  /* the version of all that the taker has, but for `todo` */
byte todo;                /* bits: blocks that the taker lacks */
byte pulled = NOBODY;     /* who has the layer of the next commit */

/* ---- servers: kept */
mtype = { NONE, PART, SEALED, HOME };
mtype kept[2] = NONE;     /* what the next server takes back */
byte kept_term[2];        /* of a home */
byte for_term[2];         /* of what is prepared: PART or SEALED */
byte version[2];
byte content[2 * NB];
byte layers[2];           /* bits: commits whose layer is here, and not applied */
#define CONTENT(s, b) content[(s) * NB + (b)]
/* ---- servers: die with them */
mtype is[2] = NONE;
byte heard[2];            /* of a home: the latest term that it has heard of */
byte attempt[2];          /* that it knows: none, that of the registry, one that has ended */
#define CURRENT 1
#define ENDED 2

bit lost[2];
bit ends[2];              /* it was told that an attempt has ended, and may hear it late */
byte home_in[TERMS + 2];  /* term -> server */
byte known = 2;           /* bits: terms whose home others than that home may have heard of */

/* ---- for the checks */
byte unheard = NOBODY;    /* the giver of the last move, until it has heard */
bit revived[2];           /* killed before its keeper had heard that its home has left */
bit is_gone;              /* what the taker of this move had sealed */
bit is_over;              /* that, and the giver is lost: nothing is left */
bit calm;

bit has_nothing;          /* answer of tell(): 0 outside d_step */

#define taker (1 - home)  /* before the journal is written */

#ifdef BREAK_HOLD
#define held (move == TELLS_TAKER || move == TELLS_GIVER || move == GIVES_BACK)
#else
#ifdef BREAK_RELEASE
#define held (move == LAST || move == WRITES_IT)
#else
#define held (move != RESTS && move != COPIES)
#endif
#endif

#define keeper_knows(s) (kept[s] == (is[s] == PART -> NONE : is[s]) && \
                         (is[s] != HOME || kept_term[s] == heard[s]))
#define is_right(s) (CONTENT(s, 0) == TRUTH(version[s], 0) && CONTENT(s, 1) == TRUTH(version[s], 1))
#define has_layer(s, c) (version[s] >= (c) || newest < (c) || (layers[s] & bit_of(c)))
#define outlives(what) ((what) == SEALED || (what) == HOME)
#define has_all(s) (!lost[s] && outlives(is[s]) && outlives(kept[s]) && is_right(s) && \
                    has_layer(s, 1) && has_layer(s, 2))

/* ------------------------------------------------------------------ servers */

inline clear(s)
{
    CONTENT(s, 0) = ABSENT; CONTENT(s, 1) = ABSENT;
    version[s] = 0; for_term[s] = 0; kept_term[s] = 0
}

inline drop_prepared(s)
{
    is[s] = NONE;
    attempt[s] = 0;
    if
    :: kept[s] == NONE -> clear(s)
    :: else
    fi
}

/* A giver that hears, and whose taker is lost: nothing is left. */
inline has_heard(s)
{
    is_over = is_over || (unheard == s && lost[1 - s]);
    revived[s] = 0;
    unheard = (unheard == s -> NOBODY : unheard)
}

#ifdef BREAK_TERM
#define is_old(s, t) false
#else
#define is_old(s, t) ((t) < heard[s])
#endif
#ifdef BREAK_PREPARED
#define may_become_home(s, t) (is[s] == SEALED)
#else
#define may_become_home(s, t) (is[s] == SEALED && (t) >= for_term[s])
#endif

/* The server hears who the home of a term is. */
inline tell(s, t)
{
    has_nothing = 0;
    if
    :: is_old(s, t)
    :: !is_old(s, t) ->
        if
        :: home_in[t] == s && is[s] == HOME -> heard[s] = t
        :: home_in[t] == s && may_become_home(s, t) ->
            assert((home == s && term == t) || unheard == s || revived[s]);
            is[s] = HOME;
            heard[s] = t;
            attempt[s] = 0
        :: home_in[t] == s && is[s] != HOME && !may_become_home(s, t) -> has_nothing = 1
        :: home_in[t] != s ->
            if
            :: is[s] == HOME -> is[s] = NONE; heard[s] = 0; has_heard(s)
            :: (is[s] == PART || is[s] == SEALED) && t >= for_term[s] ->
                drop_prepared(s); has_heard(s)
            :: else
            fi
        fi
    fi
}

/* What is sealed, and of which nobody says anything, is the registry's to say. */
inline ask_about_sealed(s)
{
    if
    :: term >= for_term[s] -> tell(s, term); has_nothing = 0
    :: else -> drop_prepared(s)
    fi
}
/* It has an answer: the new home has heard (lookups wait for that). And it is not asked in the last
 * step of a move to there: that takes seconds, and nobody asks before a minute is over. */
#define may_ask(s) (move != TELLS_TAKER && !((move == LAST || move == WRITES_IT) && taker == s))

/* The journal says next that it is the home, or says so, and nobody else need have heard of it. */
#define is_needed(s) ((move == WRITES_IT && s == taker) || \
                      (s == home && giver == 1 - s && !(known & bit_of(term))))

#define may_hear(s, t) (!calm && !lost[s] && (t) <= term && \
                        (home_in[t] == s || (known & bit_of(t))))

proctype Server(byte s)
{
end:
    do
    /* the keeper hears */
    :: d_step {
        !lost[s] && !keeper_knows(s) ->
        kept[s] = (is[s] == PART -> NONE : is[s]);
        if
        :: is[s] == HOME -> kept_term[s] = heard[s]; for_term[s] = 0
        :: is[s] == NONE -> clear(s)
        :: else
        fi
       }
    /* a layer is applied */
    :: d_step {
        is[s] == HOME && version[s] < newest && (layers[s] & bit_of(version[s] + 1)) ->
        version[s]++;
        CONTENT(s, version[s] - 1) = version[s];
        layers[s] = layers[s] & ~bit_of(version[s])
       }
    /* killed, and started again */
    :: d_step {
        !calm && !lost[s] ->
        revived[s] = (outlives(kept[s]) && (revived[s] || is[s] == NONE));
#ifdef BREAK_ATTEMPT
        if
        :: is[s] == PART -> CONTENT(s, 0) = ABSENT; CONTENT(s, 1) = ABSENT
        :: else -> is[s] = kept[s]; attempt[s] = 0
        fi;
#else
        is[s] = kept[s];
        attempt[s] = 0;
#endif
        heard[s] = (kept[s] == HOME -> kept_term[s] : 0);
        if
        :: is[s] == NONE -> clear(s)
        :: else
        fi
       }
    /* lost for good */
    :: d_step {
        !calm && !lost[s] ->
        lost[s] = 1;
        is[s] = NONE; kept[s] = NONE; attempt[s] = 0; heard[s] = 0; layers[s] = 0;
        ends[s] = 0;
        clear(s);
        is_over = is_over || (is_gone && (unheard == s || (move == WRITES_IT && home == s)));
        has_heard(s)
       }
    /* words of this term or an earlier one, which it asked for or was told; they come late */
    :: d_step { may_hear(s, 1) -> tell(s, 1); has_nothing = 0 }
    :: d_step { may_hear(s, 2) -> tell(s, 2); has_nothing = 0 }
    :: d_step { may_hear(s, 3) -> tell(s, 3); has_nothing = 0 }
    :: d_step { may_hear(s, 4) -> tell(s, 4); has_nothing = 0 }
    /* an attempt has ended; a restarted taker knows it by no number */
    :: d_step { ends[s] && attempt[s] == ENDED && (is[s] == PART || is[s] == SEALED) ->
                drop_prepared(s) }
    :: d_step {
        ends[s] && !attempt[s] && is[s] == SEALED ->
        is_gone = is_gone || is_needed(s);
        is_over = is_over || (is_needed(s) && lost[1 - s]);
        drop_prepared(s)
       }
    /* nobody says anything of an attempt */
    :: d_step { !calm && attempt[s] && is[s] == PART -> drop_prepared(s) }
    :: d_step { !calm && attempt[s] && is[s] == SEALED && may_ask(s) -> ask_about_sealed(s) }
    od
}

/* ----------------------------------------------------------------- registry */

inline rest()
{
    move = RESTS; at = 0; todo = 0
}

inline attempt_ends()
{
    is_gone = 0;
    if
    :: !lost[taker] ->
        ends[taker] = 1;
        attempt[taker] = (attempt[taker] == CURRENT -> ENDED : attempt[taker])
    :: else
    fi;
    rest()
}

#define giver_answers (is[home] == HOME)
#define taker_knows (is[taker] == PART && attempt[taker] == CURRENT)

inline carry(b)
{
    CONTENT(taker, b) = (version[home] == at -> CONTENT(home, b) : TRUTH(at, b));
    todo = todo & ~bit_of(b)
}

inline seal(s)
{
    is[s] = SEALED; kept[s] = SEALED; version[s] = at
}

/* What is written is what is true; the words are on their way. */
inline write_journal()
{
    giver = home;
    unheard = (lost[home] -> NOBODY : home);
    home = taker;
    term++;
    home_in[term] = home;
#ifdef BREAK_FREE
    is[giver] = NONE;
#endif
    move = TELLS_TAKER;
    todo = 0
}

/* The giver has not heard, and is the home again, in one more term. The journal has that it must
 * hear of that. */
inline give_back()
{
    at = 0;
    is_over = is_over || unheard != giver; /* it had heard when the taker was lost */
    home = giver;
    term++;
    home_in[term] = home;
    known = known | bit_of(term);
#ifdef BREAK_GIVE_BACK
    giver = NOBODY;
#endif
    move = GIVES_BACK
}

inline taker_is_told()
{
    at = 0;
    known = known | bit_of(term);
    move = TELLS_GIVER
}

#ifdef BREAK_KEPT_HOME
#define home_is_kept(s) true
#else
#define home_is_kept(s) keeper_knows(s)
#endif
#ifdef BREAK_KEPT_TERM
#define term_is_kept(s) true
#else
#define term_is_kept(s) keeper_knows(s)
#endif

proctype Registry()
{
end:
    do
    /* begun: the taker gets ready */
    :: d_step {
        move == RESTS && term < TERMS && giver == NOBODY && giver_answers && !lost[taker] &&
        is[taker] != HOME && keeper_knows(taker) ->
        at = version[home];
        todo = 3;
        clear(taker);
        is[taker] = PART;
        kept[taker] = NONE;
        for_term[taker] = term + 1;
        attempt[taker] = CURRENT;
        move = COPIES
       }
    /* blocks, again and again, while commits go on */
    :: d_step {
        (move == COPIES || move == LAST) && giver_answers && version[home] > at ->
#ifndef BREAK_CATCH_UP
        todo = todo | CHANGED(at, version[home]);
#endif
        at = version[home]
       }
    :: d_step { (move == COPIES || move == LAST) && giver_answers && taker_knows && (todo & 1) ->
                carry(0) }
    :: d_step { (move == COPIES || move == LAST) && giver_answers && taker_knows && (todo & 2) ->
                carry(1) }
    /* the last step: commits are held */
    :: d_step { move == COPIES && giver_answers && taker_knows -> move = LAST }
#ifdef BREAK_SEAL
    :: d_step { move == LAST && !todo && at == newest && taker_knows -> move = WRITES_IT }
    :: d_step { move == TELLS_TAKER && is[home] == PART && attempt[home] == CURRENT -> seal(home) }
#else
    :: d_step { move == LAST && !todo && at == newest && taker_knows ->
                seal(taker); move = WRITES_IT }
#endif
#ifdef BREAK_HOLD
    :: d_step { move == WRITES_IT && !lost[taker] -> write_journal() }
#else
    :: d_step { move == WRITES_IT && !lost[taker] && newest == at -> write_journal() }
#endif
    /* cancelled, or it takes too long, or something fails */
    :: d_step {
        (move == COPIES || move == LAST || move == WRITES_IT) &&
        (!calm || lost[taker] || (move != WRITES_IT && !(giver_answers && taker_knows))) ->
        attempt_ends()
       }

    /* the taker is told, then the giver */
#ifdef BREAK_ORDER
    :: d_step {
        move == TELLS_TAKER ->
        if
        :: !lost[giver] -> tell(giver, term)
        :: else
        fi;
        has_nothing = 0;
        taker_is_told()
       }
    :: d_step {
        move == TELLS_GIVER && !lost[home] ->
        tell(home, term);
        if
        :: has_nothing && !lost[giver] -> give_back()
        :: else -> giver = NOBODY; rest()
        fi;
        has_nothing = 0
       }
    :: d_step { move == TELLS_GIVER && lost[home] -> giver = NOBODY; rest() }
#else
    :: d_step {
        move == TELLS_TAKER && !lost[home] && !(is[home] == HOME && heard[home] == term) ->
        tell(home, term);
        if
        :: !has_nothing
        :: has_nothing && lost[giver] -> giver = NOBODY; rest()
        :: has_nothing && !lost[giver] -> give_back()
        fi;
        has_nothing = 0
       }
    :: d_step {
        move == TELLS_TAKER && is[home] == HOME && heard[home] == term && home_is_kept(home) ->
        taker_is_told()
       }
#ifndef BREAK_LOOK
    :: d_step {
        move == TELLS_TAKER && lost[home] ->
        if
        :: lost[giver] -> giver = NOBODY; rest()
        :: else -> give_back()
        fi
       }
#endif
    :: d_step { move == TELLS_GIVER && !lost[home] && !lost[giver] ->
                tell(giver, term); has_nothing = 0; giver = NOBODY; rest() }
#ifndef BREAK_LOOK
    :: d_step { move == TELLS_GIVER && lost[giver] -> giver = NOBODY; rest() }
    :: d_step { move == TELLS_GIVER && lost[home] && !lost[giver] -> give_back() }
#endif
#endif

    /* who is the home again is told: it has all, or has heard before that it is the home no more */
    :: d_step {
        move == GIVES_BACK && !lost[home] && !(is[home] == HOME && heard[home] == term) ->
        tell(home, term);
        if
        :: has_nothing -> giver = NOBODY; rest()
        :: else
        fi;
        has_nothing = 0
       }
    :: d_step {
        move == GIVES_BACK && is[home] == HOME && heard[home] == term && term_is_kept(home) ->
        giver = NOBODY; unheard = NOBODY; is_gone = 0; rest()
       }
    :: d_step { move == GIVES_BACK && lost[home] -> giver = NOBODY; rest() }

    /* killed, and started again */
    :: d_step {
        !calm ->
        pulled = NOBODY;
        rest();
#ifndef BREAK_FORGET
        if
        :: giver != NOBODY -> move = (giver == home -> GIVES_BACK : TELLS_TAKER)
        :: else
        fi
#else
        giver = NOBODY
#endif
       }
    od
}

/* ------------------------------------------------------------------- writer */

#ifdef BREAK_RECHECK
#define is_at_home true
#else
#define is_at_home (pulled == home)
#endif

proctype Writer()
{
end:
    do
    :: d_step {
        newest < NC && !lost[home] && pulled != home ->
        layers[home] = layers[home] | bit_of(newest + 1);
        pulled = home
       }
    :: d_step {
        newest < NC && pulled != NOBODY && !held && !lost[home] && is_at_home ->
        assert(unheard == NOBODY && (is[1 - home] != HOME || revived[1 - home]));
        newest++;
        pulled = NOBODY
       }
    od
}

/* ------------------------------------------------------------------ monitor */

#ifdef CALM
/* From some moment on nothing goes wrong. */
proctype Monitor()
{
    calm = 1
}

#define released (!held)
ltl commits_go_on { [] (calm -> <> [] released) }
#else
proctype Monitor()
{
end:
    do
    :: d_step {
        /* a reader of a block: what a home says is of the version that it says */
        assert(is[0] != HOME || is_right(0));
        assert(is[1] != HOME || is_right(1));
        assert(is[0] != HOME || home_in[heard[0]] == 0);
        assert(is[1] != HOME || home_in[heard[1]] == 1);
        /* what is decided is there */
        assert(lost[home] || has_all(home) || (unheard != NOBODY && has_all(unheard)) || is_over);
        assert(unheard == NOBODY || lost[unheard] || !lost[home] || has_all(unheard))
       }
    od
}
#endif

init {
    atomic {
        home_in[1] = 0;
        is[0] = HOME; kept[0] = HOME; heard[0] = 1; kept_term[0] = 1;
        CONTENT(1, 0) = ABSENT; CONTENT(1, 1) = ABSENT;
        run Monitor(); run Registry(); run Server(0); run Server(1); run Writer()
    }
}
