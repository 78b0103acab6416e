/* What makes the learners of the tests cheaper: preloaded into them.

   A process that waits lets others run. Open MPI waits in a loop around sched_yield(), which hands the core on
   for a moment only. Where more learners than cores wait for each other, as in most tests, these loops take
   most of the cores. */

#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int sched_yield(void) {
  struct timespec moment = {0, 20000};
  nanosleep(&moment, 0);
  return 0;
}

/* A process that ends does not tear down what was loaded before it called this: torch takes its thousands of
   operators out of their tables one by one, 0.2 s of a core. C++ objects of what was loaded later, Horovod's too,
   are destroyed before. A crash after that is seen by the tests of users' starts only (horovodrun, doctor). */

static void leave(int status, void *nothing) {
  (void)nothing;
  fflush(0);
  _exit(status);
}

void leave_the_rest(void) { on_exit(leave, 0); }
